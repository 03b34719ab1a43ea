"""The selected GPU: its numbers, its history, who runs on it."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from engine.control.ahead import Course
from engine.profile import Cluster
from engine.telemetry.reading import ReadingState
from engine.telemetry.snapshot import NodeState, Snapshot
from tui.metrics import reasons
from tui.widgets.figures import DASH, age, number
from tui.widgets.pane import Pane
from tui.widgets.plot import Floats, binned, columns, sparkline

ROWS = 3
"""Lines of the plot of what was and what comes."""
History = dict[str, tuple[Floats, Floats]]


class Detail(Pane):
    """`show` draws one GPU; nothing is kept."""

    def show(
        self,
        cluster: Cluster,
        snapshot: Snapshot,
        node: int,
        slot: int,
        history: History,
        plain: bool,
        role: str = "",
        course: Course | None = None,
    ) -> None:
        """`history` maps temperature_c, power_w and sm_clock_mhz to (times, values), oldest first; `role` is what the
        running job has there, `course` where its temperature goes."""
        self.fill(
            lambda w, _: detail(cluster, snapshot, node, slot, history, max(20, (w or 40) - 2), plain, role, course)
        )


def detail(
    cluster: Cluster,
    snapshot: Snapshot,
    node: int,
    slot: int,
    history: History,
    width: int,
    plain: bool,
    role: str = "",
    course: Course | None = None,
) -> Text:
    """The text of the pane."""
    profile, status = cluster.nodes[node], snapshot.nodes[node]
    text = Text(no_wrap=False)
    text.append(f"{profile.name} GPU {slot}", "bold")
    text.append(f"  rack {profile.rack} u{profile.u}\n", "dim")
    if status.state is not NodeState.LIVE:
        since = age(max(0.0, snapshot.time - status.since))
        text.append(f"{status.state.value} for {since}: {status.reason}\n", "bold red")
    for trouble in status.troubles:
        text.append(f"{trouble}\n", "red")
    if slot >= len(status.rows):
        text.append("Nothing read from this GPU yet.\n", "dim")
        return text
    row, table = status.rows[slot], snapshot.gpus

    def value(name: str) -> float:
        return float(table[name][row])

    def cell(name: str, unit: str) -> str:
        """The number, or the word for why there is none."""
        state = table.state(name, row)
        if state in (ReadingState.VALUE, ReadingState.STALE, ReadingState.ABSENT):
            return number(value(name), 0, unit)
        return str(state.value)

    text.append(f"{table.name[row] or DASH}\n", "dim")
    if role:
        text.append(f"{role}\n", "bold")
    facts = table.facts[row]
    if facts.note:
        text.append(f"{facts.note}\n", "dim")
    own = value("slowdown_c")
    slowdown = own if not np.isnan(own) else cluster.device_of(profile).temperature_c.slowdown
    margin = slowdown - value("temperature_c")
    lines = [
        ("Temperature", cell("temperature_c", "C"), f"{number(margin, 0, 'K')} to slowdown"),
        ("Power", cell("power_w", "W"), f"limit {number(value('power_limit_w'), 0, 'W')}"),
        ("SM clock", cell("sm_clock_mhz", "MHz"), f"HBM {number(value('memory_temperature_c'), 0, 'C')}"),
        ("Utilisation", cell("utilization_pct", "%"), ""),
        (
            "Memory",
            number(value("memory_used_mib") / 1024, 1, "GiB"),
            f"of {number(value('memory_total_mib') / 1024, 1, 'GiB')}",
        ),
        ("Throttle", reasons(value("throttle")), ""),
    ]
    if facts.numa_node is not None or facts.near:
        lines.append(("Beside", f"NUMA {DASH if facts.numa_node is None else facts.numa_node}", ", ".join(facts.near)))
    lines += [("MIG", part.name, f"instance {part.gpu_instance}") for part in facts.mig]
    for name, first, second in lines:
        text.append(f"{name:<12}", "dim")
        text.append(f"{first:<11}")
        text.append(f" {second}\n", "dim")
    for metric, unit in (("temperature_c", "C"), ("power_w", "W"), ("sm_clock_mhz", "MHz")):
        times, values = history.get(metric, (np.array([]), np.array([])))
        known = values[~np.isnan(values)]
        if len(known):
            span = f"{known.min():.0f}-{known.max():.0f} {unit}, {age(float(times[-1] - times[0]))}"
            if metric == "temperature_c" and course is not None:
                text.append(f"{span}; ", "dim")
                text.append_text(foreseen(values, course, width, plain))
                continue
            text.append(f"{span}\n", "dim")
            text.append(sparkline(values, width, plain=plain) + "\n")
    for process in table.processes[row][:4]:
        text.append(f"pid {process.pid} {process.name}", "dim")
        text.append(f" {number(process.memory_mib, 0, 'MiB')}\n", "dim")
    return text


def foreseen(values: Floats, course: Course, width: int, plain: bool) -> Text:
    """What was measured and, right of a line, the next ten minutes: filled to the band's lower edge, hatched to the
    upper one. In words, where it settles or when it reaches its limit."""
    text = Text()
    if np.isfinite(course.reaches_s):
        when = "now" if course.reaches_s < 1 else f"in {age(course.reaches_s)}"
        text.append(f"at its limit, {course.limit_c:.0f} C, {when}\n", "bold yellow")
    else:
        text.append(f"in 10 min {course.low[-1]:.0f}-{course.high[-1]:.0f} C, limit {course.limit_c:.0f} C\n", "dim")
    past = binned(values, width // 2)
    ahead_s = np.linspace(0.0, float(course.times_s[-1]), width - width // 2 - 1)
    low, high = (np.interp(ahead_s, course.times_s, edge) for edge in (course.low, course.high))
    bottom = min(np.nanmin(past), low.min()) - 1.0
    top = max(np.nanmax(past), high.max())
    before = columns(past, past, ROWS, bottom, top, plain)
    after = columns(low, high, ROWS, bottom, top, plain)
    for was, will in zip(before, after, strict=True):
        text.append(f"{was:>{width // 2}}")
        text.append("|", "dim")
        text.append(f"{will}\n", "cyan")
    return text
