"""The commands that show, beside the console: their options here, each one's work in a file of its own. Imports are
lazy, as in `tui.cli`, of which this is a part."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Size = tuple[int, int]


def add(commands: Any, count: Callable[[str], int]) -> None:
    """Add them to the parser's commands; `count` reads a whole number above 0."""
    shot = commands.add_parser("screenshot", help="a pane of the console on a cluster, as an SVG picture")
    shot.add_argument("screen", metavar="SCREEN", help="racks, gpu, jobs, links, plans, alarms, log")
    shot.add_argument("--cluster", required=True, metavar="F", help="an inventory file")
    shot.add_argument("-o", "--output", required=True, metavar="FILE", help="where the SVG goes")
    shot.add_argument("--size", type=size, default=(120, 36), metavar="WxH", help="characters; default: 120x36")
    shot.add_argument("--wait", type=count, default=20, metavar="S", help="longest look; default: %(default)s")
    shot.add_argument("--ascii", action="store_true", help="no characters beyond ASCII in plots and bars")
    plans = commands.add_parser("plans", help="every plan that fits, on a screen: points, a table, pins, export")
    plans.add_argument("--model", required=True, metavar="M", help="a built-in model, or a file")
    plans.add_argument("--cluster", required=True, metavar="C", help="a built-in cluster, or a file; no node is asked")
    plans.add_argument("--plan", metavar="P", help="one to stand beside them, pinned; its batch and precision hold")
    plans.add_argument("--where", action="append", default=[], metavar="'NAME<N'", help="a constraint, such as zero<=1")
    plans.add_argument("--batch", type=count, metavar="N", help="sequences a step; default: the plan's, or 128")
    plans.add_argument("--ascii", action="store_true", help="no characters beyond ASCII in plots and bars")
    serve = commands.add_parser("serve", help="a read-only console in a browser; there is no login")
    serve.add_argument("--cluster", required=True, metavar="F", help="an inventory file")
    serve.add_argument("--listen", metavar="HOST:PORT", help="default: 127.0.0.1:8000, for this machine alone")
    serve.add_argument("--ascii", action="store_true", help="no characters beyond ASCII in plots and bars")
    report = commands.add_parser("report", help="a recording as one HTML page: plots, alarms, actions, their effect")
    report.add_argument("recording", metavar="FILE", help="such as run.rks")
    report.add_argument("-o", "--output", required=True, metavar="FILE", help="where the page goes")


def size(text: str) -> Size:
    """`120x36` as columns and rows."""
    columns, _, rows = text.lower().partition("x")
    if not (columns.isdecimal() and rows.isdecimal()) or not (20 <= int(columns) <= 500 and 5 <= int(rows) <= 200):
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write columns and rows from 20x5 to 500x200")
    return int(columns), int(rows)


def _screenshot(given: Any) -> int:
    from tui.screenshot import screenshot

    return screenshot(given)


def _plans(given: Any) -> int:
    from tui.plans_app import plans

    return plans(given)


def _serve(given: Any) -> int:
    from tui.serve import serve

    return serve(given)


def _report(given: Any) -> int:
    from tui.report import report

    return report(given)


COMMANDS: dict[str, Callable[[Any], int]] = {
    "screenshot": _screenshot,
    "plans": _plans,
    "serve": _serve,
    "report": _report,
}
