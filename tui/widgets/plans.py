"""Plans side by side: what the cost model says of each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import Static

from engine.model.predict import Prediction
from tui.widgets.figures import large, number

HEAD = f"{'plan':<24}{'step s':>8}{'tok/s':>8}{'GiB':>6}{'C':>5}{'tok/J':>7}{'MFU':>6}"


class Plans(Static):
    """`show` draws a table of predictions."""

    def show(self, title: str, rows: Sequence[tuple[str, Prediction | str]]) -> None:
        """Each row is a label with its prediction, or with the reason why there is none."""
        self.update(plans(title, rows))


def plans(title: str, rows: Sequence[tuple[str, Prediction | str]]) -> Text:
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
            text.append(f"  {label:<24.24} {found}\n", "dim")
            continue
        leads = found.fits and found.iteration_s == best
        memory = number(found.memory.total_gib)
        line = (
            f"{'>' if leads else ' '} {label:<24.24}{found.iteration_s:>8.2f}{large(found.tokens_per_s):>8}"
            f"{memory:>6}{found.temperature_c:>5.0f}{found.tokens_per_joule:>7.2f}{found.mfu:>6.0%}"
        )
        text.append(line, "bold" if leads else "")
        text.append("\n" if found.fits else f" too big by {-found.headroom_gib:.0f} GiB\n", "red")
    return text
