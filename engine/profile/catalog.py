"""Where profiles are found: a name is a built-in, anything that looks like a path is a file."""

from __future__ import annotations

import difflib
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from engine.profile import cluster as cluster_file
from engine.profile import document, policy
from engine.profile.cluster import Cluster, ClusterFile, Prometheus
from engine.profile.document import ProfileError
from engine.profile.hardware import Device, NodeType
from engine.profile.model import Model
from engine.profile.plan import Plan
from engine.profile.policy import Policy
from engine.profile.stack import Stack

ROOT = Path(__file__).resolve().parent.parent.parent / "profiles"
FOLDERS = {
    "device": "hardware",
    "node type": "hardware/nodes",
    "model": "models",
    "cluster": "clusters",
    "plan": "plans",
    "policy": "policies",
    "stack": "stacks",
}

T = TypeVar("T")


def names(kind: str) -> list[str]:
    """Built-in profiles of a kind (a key of FOLDERS), sorted."""
    return sorted(p.stem for p in (ROOT / FOLDERS[kind]).glob("*.yaml"))


def find(kind: str, name: str, beside: Path | None = None) -> Path:
    """The file behind a name or path; `beside` is the folder that relative paths may also start from."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        given = Path(name).expanduser()
        tried = [given] if given.is_absolute() or beside is None else [beside / given, given]
        found = next((p for p in tried if p.is_file()), None)
        if found is None:
            raise ProfileError(f"There is no file {given} to read the {kind} from.")
        return found
    path = ROOT / FOLDERS[kind] / f"{name}.yaml"
    if path.is_file():
        return path
    if Path(name).is_file():
        return Path(name)
    known = names(kind)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    raise ProfileError(
        f"There is no {kind} named '{name}'. {hint}Built in: {', '.join(known)}. A path to a YAML file works too."
    )


@lru_cache(maxsize=256)
def _load(path: Path, mtime_ns: int, kind: Any) -> Any:
    return document.load(path, kind)


def _get(kind: str, name: str, record: type[T], beside: Path | None = None) -> T:
    path = find(kind, name, beside)
    found: T = _load(path, path.stat().st_mtime_ns, cast(Any, record))
    return found


def device(name: str, beside: Path | None = None) -> Device:
    """A GPU by name or path."""
    return _get("device", name, Device, beside)


def node_type(name: str, beside: Path | None = None) -> NodeType:
    """A server type by name or path."""
    found = _get("node type", name, NodeType, beside)
    slots = sorted(i for group in found.numa for i in group)
    if slots != list(range(found.gpus)):
        raise ProfileError(
            f"{find('node type', name, beside)}: numa: must name each of the {found.gpus} GPUs once; it names {slots}."
        )
    return found


def model(name: str) -> Model:
    """A transformer by name or path."""
    found = _get("model", name, Model)
    if (found.head_dim is None and found.hidden % found.heads) or found.heads % found.kv_heads:
        raise ProfileError(
            f"{find('model', name)}: heads {found.heads} must divide hidden {found.hidden}, "
            f"and kv_heads {found.kv_heads} must divide heads."
        )
    return found


def plan(name: str) -> Plan:
    """A parallelism plan by name or path."""
    return _get("plan", name, Plan)


def stack(name: str) -> Stack:
    """A software stack by name or path."""
    return _get("stack", name, Stack)


def stack_of(framework: str | None, year: int | None = None) -> Stack:
    """The stack of a framework as runs name it: of those whose years fit, the one whose longest word occurs in it;
    pytorch when there is none."""
    text, when = (framework or "").lower(), year or 2100
    fits = [found for found in map(stack, names("stack")) if found.years[0] <= when <= found.years[1]]
    known = [(len(word), found.name) for found in fits for word in found.frameworks if word in text]
    return stack(max(known)[1] if known else "pytorch")


def thermal_policy(name: str) -> Policy:
    """A policy by name or path."""
    found = _get("policy", name, Policy)
    policy.check(found, str(find("policy", name)))
    return found


def cluster(name: str) -> Cluster:
    """A cluster by name or path, its node types and devices found."""
    path = find("cluster", name)
    return assemble(_get("cluster", name, ClusterFile), path)


def assemble(file: ClusterFile, path: Path) -> Cluster:
    """Look up the node types and devices that an inventory names and check its places."""
    beside = path.parent
    types: dict[str, NodeType] = {}
    for node in file.nodes:
        if node.type not in types:
            try:
                types[node.type] = node_type(node.type, beside)
            except ProfileError as error:
                raise ProfileError(f"{path}: node '{node.name}': {error}") from None
    devices = {t.device: device(t.device, beside) for t in types.values()}
    cluster_file.check(file, {name: t.height_u for name, t in types.items()}, str(path))
    return Cluster(
        name=file.name,
        nodes=file.nodes,
        types=types,
        devices=devices,
        ssh=file.ssh,
        poll_interval_s=file.poll_interval_s,
        network=file.network,
        inlet=file.inlet,
        price=file.price,
        prometheus=_beside(file.prometheus, beside),
        slurm=file.slurm,
    )


def _beside(found: Prometheus | None, folder: Path) -> Prometheus | None:
    """The same with its files found: relative paths start from the inventory's folder."""
    if found is None:
        return None
    names = {key: getattr(found, key) for key in ("metrics", "token_file", "ca_file")}
    paths = {key: str(folder / Path(name).expanduser()) for key, name in names.items() if name}
    return msgspec.structs.replace(found, **paths)
