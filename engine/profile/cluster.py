"""A cluster as its owner writes it down: nodes with their place, and how to reach them."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.profile.document import ProfileError, Record
from engine.profile.hardware import Device, NodeType, Positive
from engine.profile.metrics import LabelName


class SshAddress(Record, frozen=True):
    """Where a node's SSH server listens."""

    host: str
    port: int = 22
    user: str | None = None


class LearnedGpu(Record, frozen=True):
    """Thermal constants of one GPU as a recording showed them: resistances in K/W at full flow, the sink's heat
    capacity in J/K, the rise of a rear GPU's air per watt in front, and what its air is warmer than the inlet, K."""

    r_die_k_w: Positive
    r_sink_k_w: Positive
    c_sink_j_k: Positive
    preheat_k_w: Annotated[float, Meta(ge=0)]
    inlet_k: float


class Learned(Record, frozen=True):
    """What was learned of a node, a GPU each, slot by slot."""

    recording: str
    gpus: tuple[LearnedGpu, ...]


class Node(Record, frozen=True):
    """One server: `u` is the lowest rack unit it fills. `ssh` is user@host:port; `local` means this very machine;
    `warmer_k` what its air is warmer than its place explains, K; `learned` constants of its own GPUs."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    type: str
    rack: str = "r1"
    u: Annotated[int, Meta(ge=1, le=100)] = 1
    ssh: str | None = None
    local: bool = False
    warmer_k: Annotated[float, Meta(ge=-50, le=50)] = 0.0
    learned: Learned | None = None


class Ssh(Record, frozen=True):
    """Files that every connection uses; `jump` names the host to go through."""

    known_hosts: str = "~/.ssh/known_hosts"
    identity: str | None = None
    config: str | None = None
    jump: str | None = None


class Prometheus(Record, frozen=True):
    """A Prometheus-compatible API that reads the nodes which have no address of their own. `metrics` is a file such as
    profiles/metrics/prometheus.yaml; the labels override those in it. A value of `matchers` that begins with ~ is a
    regular expression. The secret, in `token_file` or in the environment variable `token_env`, is a bearer token, or
    the password of `user`. `org` is the tenant; `step_s` how far apart samples are, seconds."""

    url: Annotated[str, Meta(pattern="^https?://[^\\s@?#]+$", max_length=500)]
    metrics: str | None = None
    node_label: LabelName | None = None
    gpu_label: LabelName | None = None
    matchers: dict[LabelName, str] = {}
    user: Annotated[str, Meta(pattern="^[^\\x00-\\x1f:]*$")] | None = None
    token_file: str | None = None
    token_env: str | None = None
    ca_file: str | None = None
    org: Annotated[str, Meta(pattern="^[\\x21-\\x7e]+$")] | None = None
    step_s: Annotated[float, Meta(ge=1, le=300)] = 15.0


class Network(Record, frozen=True):
    """Overrides the node type's ports: what one node reaches outside, Gbit/s in all. Above a leaf switch
    of `leaf_nodes` nodes `spine_share` of it is left."""

    gbps_per_node: Positive
    leaf_nodes: Annotated[int, Meta(ge=1)] | None = None
    spine_share: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Inlet(Record, frozen=True):
    """Air (or coolant) that enters the racks: C at the lowest unit, and K more per rack unit above it."""

    bottom_c: float = 24.0
    gradient_k_per_u: float = 0.0


class Price(Record, frozen=True):
    """What energy and GPU time cost."""

    per_kwh: float = 0.12
    per_gpu_hour: float = 2.5


class ClusterFile(Record, frozen=True):
    """The file a user writes; `slurm`: this machine's squeue knows its jobs."""

    name: str
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)]
    ssh: Ssh = Ssh()
    prometheus: Prometheus | None = None
    poll_interval_s: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    slurm: bool = False
    network: Network | None = None
    inlet: Inlet = Inlet()
    price: Price = Price()


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster with its node types and devices found."""

    name: str
    nodes: tuple[Node, ...]
    types: dict[str, NodeType]
    devices: dict[str, Device]
    ssh: Ssh
    poll_interval_s: float
    network: Network | None
    inlet: Inlet
    price: Price
    prometheus: Prometheus | None = None
    slurm: bool = False

    def type_of(self, node: Node) -> NodeType:
        return self.types[node.type]

    def device_of(self, node: Node) -> Device:
        return self.devices[self.types[node.type].device]

    @property
    def gpus(self) -> int:
        return sum(self.type_of(n).gpus for n in self.nodes)

    @property
    def slots(self) -> list[tuple[str, int]]:
        """(node, slot) of every GPU, as rows are numbered everywhere: node by node of the inventory."""
        return [(node.name, slot) for node in self.nodes for slot in range(self.type_of(node).gpus)]

    @property
    def gpus_per_node(self) -> int:
        return min(self.type_of(n).gpus for n in self.nodes)

    @property
    def device(self) -> Device:
        """The device that sets the pace: in a mixed cluster the one with the lowest bf16 peak."""
        return min((self.device_of(n) for n in self.nodes), key=lambda d: d.peak_tflops.get("bf16", 0.0))

    @property
    def node_type(self) -> NodeType:
        """A node type of the device that sets the pace."""
        return next(self.type_of(n) for n in self.nodes if self.device_of(n) == self.device)

    @property
    def node_gb_s(self) -> float:
        """What one node sends to the others, GB/s in one direction."""
        if self.network is not None:
            return self.network.gbps_per_node / 8
        return min(self.type_of(n).nic.gb_s for n in self.nodes)

    def inlet_c(self, node: Node) -> float:
        """Air temperature in front of `node`, C."""
        return self.inlet.bottom_c + self.inlet.gradient_k_per_u * (node.u - 1) + node.warmer_k


def parse_address(text: str) -> SshAddress:
    """`user@host:port`, user and port optional, IPv6 in brackets. ValueError with a sentence."""
    match = re.fullmatch(r"(?:([^@\s]+)@)?(?:\[([0-9A-Fa-f:.%]+)\]|([^:\s\[\]@]+))(?::(\d+))?", text)
    if not match:
        raise ValueError(f"'{text}' is not an SSH address; write user@host or user@host:port")
    user, v6, name, port = match.groups()
    number = int(port) if port else 22
    if not 0 < number < 65536:
        raise ValueError(f"'{text}' names port {number}; ports are 1 to 65535")
    return SshAddress(host=v6 or name, port=number, user=user)


def check(file: ClusterFile, heights: dict[str, int], label: str) -> None:
    """What types alone cannot say: names once, places free, one way to reach each node."""
    if file.prometheus and file.prometheus.token_file and file.prometheus.token_env:
        raise ProfileError(f"{label}: prometheus: token_file and token_env are both given; keep one.")
    seen: set[str] = set()
    filled: dict[tuple[str, int], str] = {}
    for node in file.nodes:
        if node.name in seen:
            raise ProfileError(f"{label}: nodes: the name '{node.name}' is given to two nodes.")
        seen.add(node.name)
        if node.ssh and node.local:
            raise ProfileError(f"{label}: node '{node.name}' is both local and behind ssh; keep one.")
        if node.ssh:
            try:
                parse_address(node.ssh)
            except ValueError as error:
                raise ProfileError(f"{label}: node '{node.name}': {error}.") from None
        for unit in range(node.u, node.u + heights[node.type]):
            other = filled.setdefault((node.rack, unit), node.name)
            if other != node.name:
                raise ProfileError(
                    f"{label}: '{node.name}' and '{other}' both fill rack {node.rack} unit {unit}; "
                    f"a {node.type} is {heights[node.type]} units high."
                )
