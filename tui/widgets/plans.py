"""Plans side by side: what the cost model says of each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from engine.model.predict import Prediction
from tui.widgets.figures import large, number
from tui.widgets.pane import Pane

HEAD = f"{'plan':<16}{'step s':>7}{'+/-':>5}{'tok/s':>6}{'GiB':>4}{'C':>4}{'tok/J':>6}{'MFU':>5}"


class Plans(Pane):
    """`show` draws a table of predictions."""

    def show(
        self, title: str, rows: Sequence[tuple[str, Prediction | str]], told: Sequence[str], step_s: float | None
    ) -> None:
        """Each row is a label with its prediction, or with the reason why there is none; `told` what of the rack's
        present state went into them, `step_s` what is measured of the first."""
        self.draw(plans(title, rows, told, step_s))


def plans(
    title: str, rows: Sequence[tuple[str, Prediction | str]], told: Sequence[str] = (), step_s: float | None = None
) -> Text:
    """The text of the pane; the fastest plan that fits is marked."""
    text = Text(no_wrap=True)
    text.append(f"{title}\n", "bold")
    if not rows:
        text.append("A job that names its model, or a cluster whose plans fit, is compared here.\n", "dim")
        return text
    text.append(f"  {HEAD}\n", "dim")
    fitting = [p.iteration_s for _, p in rows if not isinstance(p, str) and p.fits]
    best = min(fitting, default=0.0)
    for label, found in rows:
        if isinstance(found, str):
            text.append(f"  {label:<16.16} {found}\n", "dim")
            continue
        leads = found.fits and found.iteration_s == best
        memory = number(found.memory.total_gib)
        line = (
            f"{'>' if leads else ' '} {label:<16.16}{found.iteration_s:>7.2f}{found.confidence.band:>5.0%}"
            f"{large(found.tokens_per_s):>6}{memory:>4}{found.temperature_c:>4.0f}{found.tokens_per_joule:>6.2f}"
            f"{found.mfu:>5.0%}\n"
        )
        text.append(line, "bold" if leads else "" if found.fits else "red")
        if not found.fits:
            text.append(f"    too big by {-found.headroom_gib:.0f} GiB a GPU\n", "red")
    own = rows[0][1]
    measured = f", measured {step_s:.2f} s a step" if step_s and not isinstance(own, str) else ""
    text.append(f"\n> fastest that fits; the first row runs now{measured}.\n", "dim")
    for sentence in told:
        text.append(f"As now: {sentence}.\n", "dim")
    text.append("C: hottest GPU, settled. tok/J: GPUs and hosts.\n", "dim")
    text.append("+/-: held four of five runs that the fit never saw.\n", "dim")
    text.append("f finds all plans: points, table, pins, export.\n", "dim")
    return text
