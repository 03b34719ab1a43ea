"""The commands and their options, light to parse: no numpy and no textual."""

from __future__ import annotations

import argparse
from typing import NoReturn

from tui import showing

VERSION = "0.1.0"
FORMS = ["yaml", "megatron", "nemo", "torchtitan", "deepspeed"]
THEMES = ["dark", "light", "terminal", "terminal-light"]
DEMO_CLUSTER, DEMO_MODEL, DEMO_PLAN = "h200x32-400g", "llama3-8b", "data-parallel"


class Parser(argparse.ArgumentParser):
    """Errors are one sentence that says where help is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = Parser(
        prog="rackside",
        description="A terminal control room for distributed LLM training: see the rack, predict what a key will do, "
        "do it safely, see that it did.",
    )
    top.add_argument("--version", action="version", version=f"rackside {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    console = commands.add_parser("console", help="open the console on a cluster")
    console.add_argument("--cluster", required=True, metavar="C", help="an inventory file, or a built-in such as lab")
    _console_options(console)

    demo = commands.add_parser("demo", help="open the console on a simulated cluster, reached over real SSH")
    demo.add_argument("--cluster", default=DEMO_CLUSTER, metavar="C", help="default: %(default)s")
    demo.add_argument("--model", default=DEMO_MODEL, metavar="M", help="what its job trains; default: %(default)s")
    demo.add_argument("--plan", default=DEMO_PLAN, metavar="P", help="how; default: %(default)s")
    demo.add_argument("--headless", action="store_true", help="no screen: run for --seconds and print a summary")
    demo.add_argument("--seconds", type=_seconds, default=10.0, metavar="N", help="default: %(default)s")
    demo.add_argument("--json", action="store_true", help="the summary as one JSON object")
    _console_options(demo)

    predict = commands.add_parser("predict", help="what a plan will do: time, traffic, memory, power, cost")
    predict.add_argument("--model", required=True, metavar="M", help="a built-in model, or a file")
    predict.add_argument("--cluster", required=True, metavar="C", help="a built-in cluster, or a file")
    predict.add_argument("--plan", required=True, metavar="P", help="a built-in plan, or a file")
    predict.add_argument("--json", action="store_true", help="one JSON object")
    plan = commands.add_parser("plan", help="every plan that fits, ranked and explained")
    plan.add_argument("--model", required=True, metavar="M", help="a built-in model, or a file")
    plan.add_argument("--cluster", required=True, action="append", metavar="C", help="may be given several times")
    plan.add_argument("--objective", default="tokens_per_s", metavar="NAME", help="default: %(default)s")
    plan.add_argument("--where", action="append", default=[], metavar="'NAME<N'", help="a constraint, such as zero<=1")
    plan.add_argument("--pareto", metavar="A,B", help="also show the front over these metrics")
    plan.add_argument("--top", type=_count, default=10, metavar="N", help="default: %(default)s")
    plan.add_argument("--batch", type=_count, default=128, metavar="N", help="sequences a step; default: %(default)s")
    plan.add_argument("--sequence", type=_count, metavar="N", help="tokens a sequence; default: the model's")
    plan.add_argument(
        "--precision", type=_words, default=("bf16",), metavar="P,Q", help="one or several; default: bf16"
    )
    plan.add_argument("--stack", default="megatron-core", metavar="S", help="default: %(default)s")
    plan.add_argument(
        "--power-limit", type=_watts, action="append", default=[], metavar="W", help="also try this limit"
    )
    plan.add_argument("--gpus", type=_count, metavar="N", help="use this many, on the coolest nodes")
    plan.add_argument("--without", action="append", default=[], metavar="NODE", help="plan on what is left without it")
    plan.add_argument("--json", action="store_true", help="one JSON list, an answer for each cluster")
    plan.add_argument("--csv", action="store_true", help="a row for each plan")
    sweep = commands.add_parser("sweep", help="which cluster leads at which model size")
    sweep.add_argument("--cluster", required=True, action="append", metavar="C", help="two or more")
    sweep.add_argument("--where", action="append", default=[], metavar="'NAME<N'", help="a constraint")
    sweep.add_argument("--batch", type=_count, default=128, metavar="N", help="sequences a step; default: %(default)s")
    sweep.add_argument("--precision", type=_words, default=("bf16",), metavar="P", help="default: bf16")
    sweep.add_argument("--stack", default="megatron-core", metavar="S", help="default: %(default)s")
    sweep.add_argument("--json", action="store_true", help="one JSON list, an entry for each size")
    compare = commands.add_parser("compare", help="plans side by side, their differences explained")
    compare.add_argument("plans", nargs="+", metavar="P", help="built-in plans, or files; the first is the reference")
    compare.add_argument("--model", required=True, metavar="M")
    compare.add_argument("--cluster", required=True, action="append", metavar="C", help="may be given several times")
    compare.add_argument("--json", action="store_true", help="one JSON list")
    export = commands.add_parser("export", help="a plan in a training framework's words, or a Prometheus scrape target")
    export.add_argument("plan", nargs="?", metavar="PLAN", help="a built-in plan, or a file")
    export.add_argument("--to", metavar="FORM | TIME", help=f"{', '.join(FORMS)}; --recording: until when")
    export.add_argument("--prometheus", action="store_true", help="instead: serve what the console would show")
    export.add_argument("--cluster", metavar="C", help="--prometheus: an inventory file")
    export.add_argument("--listen", metavar="HOST:PORT", help="--prometheus: default: 127.0.0.1:9464")
    export.add_argument("--recording", metavar="FILE", help="instead: what a recording holds, as a table")
    export.add_argument("-o", "--output", metavar="FILE", help="--recording: a .csv, or a .parquet where pyarrow is")
    export.add_argument(
        "--from", dest="begin", metavar="TIME", help="--recording: 12:30, 2026-01-31T12:30:00 or +600 (s)"
    )
    export.add_argument("--metrics", type=_words, metavar="A,B", help="--recording: these alone")
    imported = commands.add_parser("import", help="a framework's launch words as a plan, predicted on a cluster")
    imported.add_argument("--cluster", metavar="C", help="predict it there; without, print the plan")
    imported.add_argument("--model", metavar="M", help="where the words do not tell the model's shape")
    imported.add_argument("--json", action="store_true", help="the prediction as one JSON object")
    imported.add_argument("words", nargs="*", metavar="FILE | -- COMMAND", help="a file, or a command line after --")
    forecast = commands.add_parser("forecast", help="every GPU's temperature over the next ten minutes")
    forecast.add_argument("--cluster", required=True, metavar="C", help="an inventory file")
    forecast.add_argument("--recording", metavar="FILE", help="what was seen before, instead of watching the nodes")
    forecast.add_argument("--seconds", type=_seconds, default=60.0, metavar="N", help="watch so long; default: 60")
    forecast.add_argument("--json", action="store_true", help="one JSON object")
    twin = commands.add_parser("twin", help="a plan's temperatures, clocks and energy over some minutes, offline")
    twin.add_argument("--plan", required=True, metavar="P", help="a built-in plan, or a file")
    twin.add_argument("--cluster", required=True, metavar="C", help="a built-in cluster, or a file")
    twin.add_argument("--model", default=DEMO_MODEL, metavar="M", help="default: %(default)s")
    twin.add_argument("--minutes", type=_minutes, default=30.0, metavar="N", help="default: 30")
    twin.add_argument("--microbatch", type=_counts, metavar="A,B", help="try these instead of the plan's")
    twin.add_argument("--ascii", action="store_true", help="no characters beyond ASCII in plots")
    twin.add_argument("--json", action="store_true", help="one JSON object, or a list for several microbatches")
    record = commands.add_parser("record", help="write what the nodes read to a file")
    record.add_argument("--cluster", required=True, metavar="C", help="an inventory file")
    record.add_argument("-o", "--output", required=True, metavar="FILE", help="a new file, such as run.rks")
    record.add_argument("--seconds", type=_seconds, metavar="N", help="so long; without, until ctrl-c")
    record.add_argument(
        "--whole",
        type=_minutes,
        default=60.0,
        metavar="MIN",
        help="every second of the last so many "
        "minutes, older ones as mean, least and largest of ten seconds; default: 60",
    )
    record.add_argument(
        "--most-gb", type=_gigabytes, default=10.0, metavar="N", help="then the oldest goes; default: 10"
    )
    replay = commands.add_parser("replay", help="open the console on a recording, with a time line")
    replay.add_argument("recording", metavar="FILE", help="what rackside record wrote, or still writes")
    _look_options(replay)
    validate = commands.add_parser("validate", help="hold the cost model against measured runs")
    validate.add_argument(
        "runs", metavar="RUNS.yaml", help="measured runs; profiles/runs/published.yaml shows the form"
    )
    validate.add_argument("--json", action="store_true", help="one JSON object")
    calibrate = commands.add_parser("calibrate", help="fit a device's curve to measured runs, or all curves")
    calibrate.add_argument("runs", nargs="?", metavar="RUNS.yaml", help="measured runs, as few as three of one device")
    calibrate.add_argument("--heat", metavar="FILE", help="measured power, clocks and temperatures instead of runs")
    calibrate.add_argument("--thermal", metavar="FILE", help="a recording, or a CSV of time, gpu, power, temperature")
    calibrate.add_argument("--cluster", metavar="C", help="whose recording it is")
    calibrate.add_argument("--hardware", metavar="D", help="this device alone; without it every device and stack")
    calibrate.add_argument("-o", "--output", required=True, metavar="OUT", help="the profile, or a folder for all")
    calibrate.add_argument("--json", action="store_true", help="one JSON object")
    card = commands.add_parser("reportcard", help="the source text's figures beside the model's own")
    card.add_argument("--json", action="store_true", help="one JSON list")
    for name, words in (
        ("poll", "what every GPU reads, printed"),
        ("doctor", "what works on each node, and what not"),
        ("jobs", "the training jobs that run there, and which rank runs where"),
    ):
        nodes = commands.add_parser(name, help=words)
        nodes.add_argument("--cluster", required=True, metavar="FILE", help="an inventory file")
        nodes.add_argument("--wait", type=_count, default=20, metavar="S", help="longest look; default: %(default)s")
        nodes.add_argument("--json", action="store_true", help="one JSON list")
        if name == "poll":
            nodes.add_argument("--once", action="store_true", help="once, instead of until it is stopped")
    bench = commands.add_parser("bench", help="how fast it is on this machine")
    bench.add_argument(
        "what",
        choices=["predict", "plans", "forecast", "poll", "prometheus", "guard", "hook", "tui", "soak", "record"],
        help="one prediction, a search of the space, the twin, telemetry over SSH or through a Prometheus, a "
        "simulated hour with a failed fan, without and with the guard, the job hook, the console in a terminal, "
        "hours of it in less, or a recording",
    )
    bench.add_argument("--seed", type=_count, metavar="N", help="forecast: repeat an earlier run")
    bench.add_argument("--nodes", type=_count, default=1024, metavar="N", help="poll: default: %(default)s")
    bench.add_argument("--hours", type=_count, default=24, metavar="H", help="soak: default: %(default)s")
    bench.add_argument("--seconds", type=_count, default=20, metavar="S", help="poll, hook, tui: default: %(default)s")
    bench.add_argument(
        "--gpus", type=_count, default=8192, metavar="N", help="prometheus, tui, record: default: %(default)s"
    )
    bench.add_argument("--json", action="store_true", help="one JSON object")
    hook = commands.add_parser("hook", help="print rackside_hook.py, for copying beside a training script")
    hook.add_argument(
        "--for",
        dest="trainer",
        metavar="NAME",
        help="print rackside_trainers.py, its adapters, instead: ddp, fsdp, huggingface, lightning, deepspeed, "
        "megatron, torchtitan",
    )
    profiles = commands.add_parser("profiles", help="list the built-in profiles, or check a file")
    profiles.add_argument("kind", nargs="?", help="device, node type, model, cluster, plan, policy or stack")
    profiles.add_argument("name", nargs="?", help="a name or a file to check")
    act = commands.add_parser("act", help="one action: predicted, confirmed, carried out, told")
    act.add_argument("--cluster", required=True, metavar="F", help="an inventory file")
    act.add_argument("what", choices=["throttle", "microbatch", "rebalance", "pause", "resume", "requeue"])
    act.add_argument(
        "target", metavar="TARGET", help="throttle: n01, n01:3, n01:0-3, rack:r1, job:NAME, all; else a job, or -"
    )
    act.add_argument(
        "value",
        nargs="?",
        metavar="VALUE",
        help="600 (W), -100, 1400MHz; halve, double, 4; microbatches, restart; seconds; a plan",
    )
    act.add_argument(
        "--by", choices=["hook", "slurm", "processes"], default="", help="pause: who does it; default: best"
    )
    act.add_argument("--to", default="megatron", choices=FORMS, help="requeue: the plan's form; default: %(default)s")
    act.add_argument("--permanent", action="store_true", help="throttle: leave it when this command ends")
    undo = commands.add_parser("undo", help="put back what an action in the log changed")
    undo.add_argument("id", nargs="?", metavar="ID", help="the beginning of its id; without, the last one in force")
    undo.add_argument("--cluster", required=True, metavar="F", help="an inventory file")
    for one in (act, undo):
        one.add_argument("--dry-run", action="store_true", help="say what it would do, and do nothing")
        one.add_argument("--yes", action="store_true", help="do not ask")
        one.add_argument("--steal", metavar="REASON", help="take the job from another operator")
        one.add_argument("--wait", type=_count, default=20, metavar="S", help="longest look; default: %(default)s")
        one.add_argument("--json", action="store_true", help="one JSON object")
    guard = commands.add_parser("guard", help="a thermal policy at work without a screen, until it is stopped")
    guard.add_argument("--cluster", required=True, metavar="F", help="an inventory file")
    guard.add_argument("--policy", default="margin", metavar="P", help="default: %(default)s")
    guard.add_argument("--dry-run", action="store_true", help="say what it would do, and do nothing")
    guard.add_argument("--json", action="store_true", help="one JSON object a line")
    alarms = commands.add_parser("alarms", help="what stands on a cluster, seen or not, shelved or not")
    alarms.add_argument("--cluster", required=True, metavar="F", help="an inventory file")
    alarms.add_argument("--acknowledge", metavar="KEY", help="say that it was seen; the beginning of a key, or all")
    alarms.add_argument("--shelve", metavar="KEY", help="keep it off the list for --minutes, with --reason")
    alarms.add_argument("--minutes", type=_count, default=60, metavar="N", help="default: %(default)s")
    alarms.add_argument("--reason", metavar="TEXT", help="why it is shelved")
    alarms.add_argument("--unshelve", metavar="KEY", help="let it come back now")
    alarms.add_argument("--log", action="store_true", help="the whole story instead, a line an event")
    alarms.add_argument("--wait", type=_count, default=20, metavar="S", help="longest look; default: %(default)s")
    alarms.add_argument("--json", action="store_true", help="one JSON object, or with --log one a line")
    score = commands.add_parser("score", help="how good the predictions in that log were")
    score.add_argument("--json", action="store_true", help="one JSON object")
    audit = commands.add_parser("audit", help="print the log of actions")
    audit.add_argument("--json", action="store_true", help="one JSON object a line, as it is stored")
    showing.add(commands, _count)
    return top


def _console_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--policy", default="margin", metavar="P", help="thermal policy; default: %(default)s")
    command.add_argument("--read-only", action="store_true", help="this console can never be armed")
    command.add_argument("--record", metavar="FILE", help="record from the start; key R begins and ends it, too")
    _look_options(command)


def _look_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ascii", action="store_true", help="no characters beyond ASCII in plots and bars")
    command.add_argument("--keys", metavar="FILE", help="a YAML file of action: key, to change keys")
    command.add_argument("--theme", choices=THEMES, help="default: as it was last; ctrl+p has more of them")
    command.add_argument("--reduced-motion", action="store_true", help="no animation, no blinking cursor")


def _number(text: str, unit: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of {unit}") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{unit} must be between {least:g} and {most:g}")
    return value


def _seconds(text: str) -> float:
    return _number(text, "seconds", 0.001, 86400)


def _minutes(text: str) -> float:
    return _number(text, "minutes", 0.01, 1440)


def _gigabytes(text: str) -> float:
    return _number(text, "gigabytes", 0.001, 1e6)


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word) or (text,)


def _watts(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of watts") from None
