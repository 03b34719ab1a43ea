"""The command line. Parsing is light and imports are lazy: --version and --help load no numpy and no textual."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tui import showing
from tui.options import FORMS, parser

LOADING = 50_000
"""What loads is not garbage: at Python's own threshold the collector looks through it a hundred times."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. Whatever a user can get wrong ends in a sentence on standard error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # argparse would take the launch command's own options: what stands behind -- is kept from it.
    cut = words.index("--") if words[:1] == ["import"] and "--" in words else len(words)
    given = parser().parse_args(words[:cut])
    if cut < len(words):
        given.words = [*given.words, *words[cut + 1 :]]
    if given.command is None:
        parser().print_help()
        return 0
    gc.set_threshold(LOADING)
    from engine.profile import ProfileError

    try:
        return COMMANDS[given.command](given)
    except ProfileError as error:
        print(f"rackside: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _console(given: Any) -> int:
    from tui.start import console

    return console(given)


def _demo(given: Any) -> int:
    from tui.demo import demo

    return demo(given)


def _offline(given: Any) -> int:
    from tui import offline

    run: Callable[[Any], int] = getattr(offline, given.command)
    return run(given)


def _planning(given: Any) -> int:
    from tui import planning

    run: Callable[[Any], int] = getattr(planning, {"import": "imported"}.get(given.command, given.command))
    return run(given)


def _heat(given: Any) -> int:
    from tui import heat

    run: Callable[[Any], int] = getattr(heat, given.command)
    return run(given)


def _nodes(given: Any) -> int:
    from tui import nodes

    run: Callable[[Any], int] = getattr(nodes, given.command)
    return run(given)


def _jobs(given: Any) -> int:
    from tui.jobs import jobs

    return jobs(given)


def _act(given: Any) -> int:
    from tui import acting

    run: Callable[[Any], int] = getattr(acting, given.command)
    return run(given)


def _alarms(given: Any) -> int:
    from tui.alarms import alarms

    return alarms(given)


def _guard(given: Any) -> int:
    from tui.guarding import guard

    return guard(given)


def _recordings(given: Any) -> int:
    from tui import recordings

    run: Callable[[Any], int] = getattr(recordings, given.command)
    return run(given)


def _export(given: Any) -> int:
    from engine.profile import ProfileError

    if given.recording:
        return _recordings(given)
    if given.output or given.begin or given.metrics:
        raise ProfileError("-o, --from and --metrics go with --recording. See rackside export --help.")
    if given.to is not None and given.to not in FORMS:
        raise ProfileError(f"There is no form {given.to}; there are {', '.join(FORMS)}.")
    if given.prometheus:
        if given.plan or given.to:
            raise ProfileError("--prometheus serves a cluster; it takes no plan and no --to.")
        from tui import scrape

        return scrape.export(given)
    if given.plan is None or given.to is None or given.cluster or given.listen:
        raise ProfileError("export takes a PLAN and --to, or --prometheus and --cluster. See rackside export --help.")
    return _planning(given)


def _hook(given: Any) -> int:
    from pathlib import Path

    import rackside_hook
    import rackside_trainers

    from engine.profile import ProfileError

    names = rackside_trainers.FRAMEWORKS
    if given.trainer and given.trainer not in names:
        raise ProfileError(f"There is no adapter for {given.trainer}; there are {', '.join(names)}.")
    found = rackside_trainers if given.trainer else rackside_hook
    print(Path(str(found.__file__)).read_text(encoding="utf-8"), end="")
    return 0


def _profiles(given: Any) -> int:
    from engine.profile import ProfileError, catalog

    readers: dict[str, Callable[[str], Any]] = {
        "device": catalog.device,
        "node type": catalog.node_type,
        "model": catalog.model,
        "cluster": catalog.cluster,
        "plan": catalog.plan,
        "policy": catalog.thermal_policy,
        "stack": catalog.stack,
    }
    if given.kind is None:
        for kind in readers:
            print(f"{kind + ':':<11} {', '.join(catalog.names(kind))}")
        return 0
    if given.kind not in readers:
        raise ProfileError(f"There is no kind of profile named '{given.kind}'; there are {', '.join(readers)}.")
    if given.name is None:
        print("\n".join(catalog.names(given.kind)))
        return 0
    found = readers[given.kind](given.name)
    print(f"{given.name}: a valid {given.kind}, {found.name}")
    return 0


def _audit(given: Any) -> int:
    import json
    import time

    from engine.act.audit import Audit, default_path

    for entry in Audit(default_path()).read():
        if given.json:
            print(json.dumps(entry))
        else:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(entry.get("at") or entry.get("time") or 0)))
            what = f"{entry.get('title')} - {entry.get('stage')}"
            print(
                f"{when}  {entry.get('operator')}  {entry.get('cluster')}  {what} {entry.get('reason') or ''}".rstrip()
            )
    return 0


def _score(given: Any) -> int:
    from engine.act.audit import Audit, default_path
    from engine.act.score import scores
    from tui.output import printed

    found = scores(Audit(default_path()).read())
    if given.json:
        told = {s.metric: {"n": len(s.errors), "median": s.median, "worst": s.worst} for s in found}
        print(printed(told))
        return 0
    if not any(s.errors for s in found):
        print("No action in the log has been measured yet: that takes five steps, and ten minutes for the heat.")
        return 0
    for s in found:
        shown = (f"{s.median:.1%}", f"{s.worst:+.1%}") if s.relative else (f"{s.median:.1f} K", f"{s.worst:+.1f} K")
        said = f"off by {shown[0]} in the median, at worst {shown[1]}" if s.errors else "not measured yet"
        print(f"{s.metric:<12} {len(s.errors):>4} actions  {said}")
    return 0


COMMANDS: dict[str, Callable[[Any], int]] = {
    "console": _console,
    "demo": _demo,
    "predict": _offline,
    "plan": _planning,
    "compare": _planning,
    "sweep": _planning,
    "export": _export,
    "poll": _nodes,
    "doctor": _nodes,
    "jobs": _jobs,
    "import": _planning,
    "act": _act,
    "undo": _act,
    "guard": _guard,
    "alarms": _alarms,
    "validate": _offline,
    "calibrate": _offline,
    "reportcard": _offline,
    "bench": _offline,
    "forecast": _heat,
    "twin": _heat,
    "record": _recordings,
    "replay": _recordings,
    "hook": _hook,
    "profiles": _profiles,
    "audit": _audit,
    "score": _score,
    **showing.COMMANDS,
}

if __name__ == "__main__":
    sys.exit(main())
