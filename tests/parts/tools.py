"""A node's tools as small shell scripts that print what a test has written, behind a login that may hide python3."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.telemetry.tools.nvidia_smi import NEW_FIELDS, OLD_FIELDS

UNITS = {"power": " [W]", "clocks.": " [MHz]", "utilization": " [%]", "memory.": " [MiB]"}
H100 = {
    "temperature.gpu": "58",
    "temperature.gpu.tlimit": "29",
    "temperature.memory": "63",
    "power.draw": "431.25 W",
    "power.limit": "650.00 W",
    "clocks.sm": "1830 MHz",
    "clocks.mem": "2619 MHz",
    "utilization.gpu": "93 %",
    "memory.used": "60123 MiB",
    "memory.total": "81559 MiB",
    "clocks_event_reasons.active": "0x0000000000000004",
    "clocks_throttle_reasons.active": "0x0000000000000004",
    "power.min_limit": "200.00 W",
    "power.max_limit": "700.00 W",
    "power.default_limit": "700.00 W",
    "clocks.max.sm": "1980 MHz",
    "pcie.link.gen.current": "1",
    "pcie.link.gen.max": "5",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "remapped_rows.correctable": "0",
    "remapped_rows.uncorrectable": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "mig.mode.current": "Disabled",
    "persistence_mode": "Enabled",
    "driver_version": "555.42.06",
    "name": "NVIDIA H100 80GB HBM3",
}

# `$0` tells its folder. A file `hang` makes it stand still, deaf to SIGTERM, as long as it is there.
HEAD = """#!/bin/sh
folder=${0%/*}
echo "$$ ${0##*/} $*" >>"$folder/calls"
still() {
    trap '' TERM
    while [ -e "$folder/hang" ]; do sleep 0.1; done
    exit 1
}
[ ! -e "$folder/hang" ] || still
out() { [ ! -e "$folder/$1" ] || cat "$folder/$1"; }
"""
NVIDIA = (
    HEAD
    + """
case "$*" in
*--query-gpu=*clocks_event_reasons.active*)
    if [ -e "$folder/refuses" ]; then
        echo 'Field "clocks_event_reasons.active" is not a valid field to query.'
        exit 2
    fi
    rows=rows ;;
*--query-gpu=*) rows=old ;;
*--query-compute-apps=*) out apps; exit ;;
"-q -x") out details; exit ;;
-L) out list; exit ;;
"topo -m") out topo; exit ;;
"nvlink -s") out nvlink; exit ;;
"nvlink -e") out errors; exit ;;
*) exit 2 ;;
esac
out "$rows.head"
while :; do
    out said >&2
    out "$rows"
    [ ! -e "$folder/status" ] || exit "$(cat "$folder/status")"
    case "$*" in *-lms*) sleep 0.2 ;; *) exit 0 ;; esac
    [ ! -e "$folder/hang" ] || still
done
"""
)
AMD = HEAD + '\ncase "$1" in metric) out metric ;; static) out static ;; esac\n'
ROCM = HEAD + "\nout rocm\n"
LOGIN = """#!/bin/sh
case "$SSH_ORIGINAL_COMMAND" in
*python3*) {hide} ;;
esac
PATH={folder}:$PATH
export PATH
{shout}
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""


def bus(index: int) -> str:
    return f"0000:{index + 0x21:02X}:00.0"


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-1111-2222-3333-444444444444"


def h100(gpu: int, **said: str) -> dict[str, str]:
    """The cells of one GPU by field; dots in the names of those that differ are written as two underscores."""
    changed = {name.replace("__", "."): value for name, value in said.items()}
    return {"index": str(gpu), "uuid": uuid(gpu), "pci.bus_id": f"0000{bus(gpu)}", **H100} | changed


@dataclass
class Tools:
    """`folder` holds the programs and what they print."""

    folder: Path

    def put(self, name: str, text: str) -> None:
        fresh = self.folder / f"{name}.new"
        fresh.write_text(text)
        fresh.replace(self.folder / name)

    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def program(self, name: str, script: str) -> None:
        self.put(name, script)
        (self.folder / name).chmod(0o755)

    def nvidia(self, *gpus: Mapping[str, str]) -> None:
        """nvidia-smi, and these GPUs as it prints them now."""
        if not (self.folder / "nvidia-smi").exists():
            self.program("nvidia-smi", NVIDIA)
        for name, fields in (("rows", NEW_FIELDS), ("old", OLD_FIELDS)):
            self.put(f"{name}.head", ", ".join(_titled(field) for field in fields) + "\n")
            self.put(name, "".join(", ".join(gpu.get(f, "[N/A]") for f in fields) + "\n" for gpu in gpus))

    def amd(self, metric: Any, static: Any, before: str = "") -> None:
        self.put("metric", before + json.dumps(metric, indent=4) + "\n")
        self.put("static", json.dumps(static, indent=4) + "\n")
        self.program("amd-smi", AMD)

    def rocm(self, cards: Any, before: str = "") -> None:
        self.put("rocm", before + json.dumps(cards))
        self.program("rocm-smi", ROCM)

    def login(self, hide: bool = True, shout: str = "") -> str:
        """sshd's line that lets every command find these tools, and no python3."""
        said = f"echo login >>{self.folder}/logins; echo \"env: 'python3': No such file or directory\" >&2; exit 127"
        said = said if hide else ":"
        self.program("login", LOGIN.format(folder=self.folder, hide=said, shout=shout))
        return f"ForceCommand {self.folder}/login\n"

    def calls(self, *words: str) -> list[str]:
        """The runs whose command line holds all these words."""
        path = self.folder / "calls"
        said = path.read_text().splitlines() if path.exists() else []
        return [line for line in said if all(word in line for word in words)]

    def asked_for_python(self) -> int:
        """How often somebody tried to start python3."""
        path = self.folder / "logins"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def running(self) -> list[int]:
        """Processes of these tools that are there now."""
        return [pid for line in self.calls() if _alive(pid := int(line.split()[0]), str(self.folder))]


def _titled(field: str) -> str:
    if field.startswith(tuple(UNITS)):
        return field + next(unit for begin, unit in UNITS.items() if field.startswith(begin))
    return field


def _alive(pid: int, words: str) -> bool:
    try:
        said = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return words.encode() in said


def notes(console: str) -> Path:
    """Where the reader of a console notes its processes."""
    return Path(f"/tmp/rackside-{os.getuid()}/shell-{console}")


def shells(console: str) -> list[int]:
    """The processes of the reader of a console: those in the group that it notes."""
    main = notes(console) / "main"
    try:
        group = main.read_text().split()[2]
    except (OSError, IndexError):
        return []
    return in_group(int(group))


def in_group(group: int) -> list[int]:
    """The processes of a process group, as `ps` would list them."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def listed(names: Sequence[str]) -> str:
    """`nvidia-smi -L` of these GPUs."""
    return "".join(f"GPU {i}: {name} (UUID: {uuid(i)})\n" for i, name in enumerate(names))


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Tools]:
    folder = tmp_path / "tools"
    folder.mkdir()
    made = Tools(folder)
    yield made
    made.drop("hang")
