"""How the probe gets onto a node: one short command, then everything else over its standard input.

Standard input is one JSON header line {"rackside": 1, "boot": n, "sources": [[name, n], …], "interval_s": s}, then the
zlib-compressed boot code and sources, `n` bytes each, then command lines. The boot code makes the modules and calls
`rackside_probe.main(stdin, stdout, host, interval_s)`. Whoever stands in for a node reads the same framing and runs the
same probe with a host of its own.
"""

from __future__ import annotations

import json
import zlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

PROBE = Path(__file__).parent / "probe" / "rackside_probe.py"

# In single quotes on the command line, so it holds none itself.
BOOTSTRAP = (
    "import sys,json,zlib;r=sys.stdin.buffer;h=json.loads(r.readline().decode());"
    'exec(zlib.decompress(r.read(h["boot"])).decode())'
)

BOOT = """
import types
if sys.version_info < (3, 6):
    sys.exit("rackside needs Python 3.6 or newer on the node; this is %d.%d" % sys.version_info[:2])
why = ""
for name, size in h["sources"]:
    source = zlib.decompress(r.read(size))
    module = sys.modules[name] = types.ModuleType(name)
    try:
        exec(compile(source, name + ".py", "exec"), module.__dict__)
    except Exception as error:
        if name == "rackside_probe":
            raise
        why = repr(error)
        sys.modules[name] = None
probe = sys.modules["rackside_probe"]
probe.main(r, sys.stdout.buffer, probe.Host(sys.modules["pynvml"], why), h["interval_s"])
"""


def probe_command() -> str:
    """The remote command: plain enough for sh, bash, fish and csh, with the usual places added to a bare PATH."""
    return f"exec env LC_ALL=C PATH=\"$PATH:/usr/bin:/usr/local/bin:/bin\" python3 -u -c '{BOOTSTRAP}'"


@lru_cache(maxsize=4)
def probe_payload(interval_s: float) -> bytes:
    """What goes to standard input before any command; about 55 KB."""
    found = find_spec("pynvml")
    if found is None or found.origin is None:
        raise RuntimeError("the package nvidia-ml-py is not installed beside rackside")
    boot = zlib.compress(BOOT.encode(), 9)
    sources = [(name, zlib.compress(path.read_bytes(), 9)) for name, path in _sources(Path(found.origin))]
    header = {
        "rackside": 1,
        "boot": len(boot),
        "sources": [[name, len(data)] for name, data in sources],
        "interval_s": interval_s,
    }
    return json.dumps(header).encode() + b"\n" + boot + b"".join(data for _, data in sources)


def _sources(pynvml: Path) -> list[tuple[str, Path]]:
    return [("pynvml", pynvml), ("rackside_probe", PROBE)]
