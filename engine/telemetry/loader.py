"""How the probe gets onto a node: one short command, then everything else over its standard input.

Standard input is one JSON header line {"rackside": 1, "boot": n, "sources": [[name, n], …], "interval_s": s, "console":
id}, then the zlib-compressed boot code and sources, `n` bytes each, then command lines. The boot code makes the modules
and calls `rackside_probe.main(stdin, stdout, host, interval_s, console)`. Whoever stands in for a node reads the same
framing and runs the same probe with a host of its own.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import zlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

PROBE = tuple(
    Path(__file__).parent / "probe" / f"{name}.py"
    for name in ("rackside_host", "rackside_values", "rackside_gpus", "rackside_leases", "rackside_probe")
)
"""The probe's modules, each after those it imports."""
PROGRAMS = ("rackside_probe", "rackside_keeper")
CONSOLE = uuid.uuid4().hex
"""This process: each of its nodes runs one probe for it."""

# In single quotes on the command line, so it holds none itself.
BOOTSTRAP = (
    "import sys,json,zlib;r=sys.stdin.buffer;h=json.loads(r.readline().decode());"
    'exec(zlib.decompress(r.read(h["boot"])).decode())'
)

BOOT = """
import os, types
if sys.version_info < (3, 6):
    sys.exit("rackside needs Python 3.6 or newer on the node; this is %d.%d" % sys.version_info[:2])
why = ""
for name, size in h["sources"]:
    source = zlib.decompress(r.read(size))
    module = sys.modules[name] = types.ModuleType(name)
    try:
        exec(compile(source, name + ".py", "exec"), module.__dict__)
    except Exception as error:
        if name.startswith("rackside"):
            raise
        why = repr(error)
        sys.modules[name] = None
host = sys.modules["rackside_host"].Host(sys.modules["pynvml"], why)
program = sys.modules[h.get("program", "rackside_probe")]
refusal = program.main(r, sys.stdout.buffer, host, h["interval_s"], h["console"])
if refusal:
    sys.exit(refusal)
os._exit(0)  # the thread that waits for input would hold up an orderly end
"""


def probe_command() -> str:
    """The remote command: plain enough for sh, bash, fish and csh, with the usual places added to a bare PATH."""
    return f"exec env LC_ALL=C PATH=\"$PATH:/usr/bin:/usr/local/bin:/bin\" python3 -u -c '{BOOTSTRAP}'"


def probe_payload(interval_s: float, node: str, keeper: bool = False) -> bytes:
    """What goes to standard input before any command; about 60 KB. `keeper`: only hold limits of AMD boards."""
    boot, sources = _code(keeper)
    name = f"{node} keeper" if keeper else node
    header = {
        "program": PROGRAMS[keeper],
        "rackside": 1,
        "boot": len(boot),
        "sources": [[name, len(data)] for name, data in sources],
        "interval_s": interval_s,
        "console": f"{CONSOLE}-{hashlib.sha256(name.encode()).hexdigest()[:12]}",
    }
    return json.dumps(header).encode() + b"\n" + boot + b"".join(data for _, data in sources)


@lru_cache(maxsize=2)
def _code(keeper: bool) -> tuple[bytes, list[tuple[str, bytes]]]:
    found = find_spec("pynvml")
    if found is None or found.origin is None:
        raise RuntimeError("the package nvidia-ml-py is not installed beside rackside")
    boot = zlib.compress(BOOT.encode(), 9)
    return boot, [(name, zlib.compress(path.read_bytes(), 9)) for name, path in _sources(Path(found.origin), keeper)]


def _sources(pynvml: Path, keeper: bool) -> list[tuple[str, Path]]:
    more = [PROBE[0].with_name(f"{PROGRAMS[True]}.py")] if keeper else []
    return [("pynvml", pynvml), *((path.stem, path) for path in (*PROBE, *more))]
