"""What a GPU and a node are: constants with their sources in the YAML beside them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from engine.profile.document import ProfileError, Record

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Precision = Literal["bf16", "fp16", "fp8", "tf32", "fp32"]


class Curve(Record, frozen=True):
    """What kernels and collectives reach of the datasheet: fitted once per device on published runs (`calibrate`).

    `best`, `best_fp8` share of the peak of an unbounded product at the highest clock; `half_outputs` output elements
    and `half_inner` inner length at which x/(x + half) is one half (waves that do not fill, prologues); `flash1` to
    `flash3` shares of the peak that generations of fused attention reach, `half_head` the head size that halves them;
    `hbm_share`, `fabric_share`, `network_share` reached bandwidth; `scatter_share` bandwidth
    that an all-to-all reaches, `grouped` share of a plain product's rate that many small experts' products reach;
    `*_hop_s` seconds a step of a ring; `kernel_s` gap
    and tail of a kernel; `beside` the share of a collective's time by which it slows kernels that run beside it;
    `straggler` relative loss each time the number of nodes doubles.
    """

    best: Fraction
    best_fp8: Fraction
    half_outputs: NonNegative
    half_inner: NonNegative
    flash1: Fraction
    flash2: Fraction
    flash3: Fraction
    half_head: NonNegative
    hbm_share: Fraction
    fabric_share: Fraction
    network_share: Fraction
    scatter_share: Fraction
    grouped: Fraction
    fabric_hop_s: NonNegative
    network_hop_s: NonNegative
    kernel_s: NonNegative
    beside: NonNegative
    straggler: NonNegative


class Fitted(Record, frozen=True):
    """What the curve was fitted on: how many runs of how many sources, per precision the error that held four of five
    runs of sources left out, and the spans of what those runs did."""

    runs: Count
    sources: Count
    error: dict[Precision, Positive]
    spans: dict[str, tuple[float, float]]
    links: tuple[str, ...]


class PowerCurve(Record, frozen=True):
    """P = leakage_w e^(leakage_per_k (T - 60)) + memory + core a f V(f)^2, watts; f in MHz, T in C.

    V rises from `v_min` at `knee_mhz` with the square of the clock above it to `v_max` at the highest clock.
    """

    leakage_w: NonNegative
    leakage_per_k: NonNegative
    memory_idle_w: NonNegative
    memory_active_w: NonNegative
    memory_clocked_w: NonNegative
    core_w_per_mhz_v2: Positive
    v_min: Positive
    v_max: Positive
    knee_mhz: Positive


class Limits(Record, frozen=True):
    """Allowed range and default of a board power limit, watts."""

    min: Positive
    default: Positive
    max: Positive


class Clock(Record, frozen=True):
    """SM clock in MHz."""

    max: Positive
    idle: Positive
    step: Positive = 15


class Thresholds(Record, frozen=True):
    """Junction temperatures in C at which the device acts by itself."""

    operating: Positive
    slowdown: Positive
    shutdown: Positive


class Die(Record, frozen=True):
    """Junction of the RC network: resistance to the heatsink in K/W and heat capacity in J/K."""

    r_sink_k_w: Positive
    c_j_k: Positive


class Fabric(Record, frozen=True):
    """A link class inside the node: links per GPU and payload per link and direction, GB/s. Not
    `switched`: traffic between NUMA nodes takes the PCIe root ports."""

    name: str
    links: Count
    gb_s_per_link: Positive
    switched: bool = True

    @property
    def gb_s(self) -> float:
        """One direction, all links of a GPU, GB/s."""
        return self.links * self.gb_s_per_link


class Pcie(Record, frozen=True):
    """PCIe port of a GPU; `gb_s` is the payload of one direction, GB/s."""

    gen: Count
    width: Count
    gb_s: Positive


class Device(Record, frozen=True):
    """One GPU as NVML or ROCm counts it (an MI250 module is two)."""

    name: str
    vendor: Literal["nvidia", "amd"]
    product: str
    memory_gib: Positive
    memory_gb_s: Positive
    peak_tflops: dict[Precision, Positive]
    curve: Curve
    chip: str
    power_limit_w: Limits
    power: PowerCurve
    clock: Clock
    temperature_c: Thresholds
    die: Die
    fabric: Fabric
    pcie: Pcie
    fitted: Fitted | None = None

    def peak_flops(self, precision: str) -> float:
        """Dense peak, FLOP/s. ProfileError when the device has no such precision."""
        try:
            return self.peak_tflops[precision] * 1e12  # type: ignore[index]
        except KeyError:
            known = ", ".join(self.peak_tflops)
            raise ProfileError(f"{self.name} has no {precision} matrix product; it has {known}.") from None


class Fan(Record, frozen=True):
    """Fans that follow the load: `least` of their flow when the GPUs idle, all of it from a mean GPU power of `full_w`
    on."""

    least: Fraction
    full_w: Positive


class Cooling(Record, frozen=True):
    """Heatsinks and air (or coolant) of a chassis, at full flow.

    `r_sink_air_k_w` heatsink or cold plate to air or coolant (K/W), `c_sink_j_k` its heat capacity (J/K), `preheat_k_w`
    the rise of the rear GPUs' air per watt of the GPU in front, `rear` the slots that breathe it; no `fan`: full flow
    always.
    """

    kind: Literal["air", "liquid"]
    r_sink_air_k_w: Positive
    c_sink_j_k: Positive
    preheat_k_w: NonNegative
    rear: tuple[int, ...] = ()
    fan: Fan | None = None


class Nic(Record, frozen=True):
    """Network ports of a node: `count` ports of `gbps` each, Gbit/s."""

    kind: Literal["infiniband", "roce", "ethernet"]
    count: Count
    gbps: Positive

    @property
    def gb_s(self) -> float:
        """All ports, one direction, GB/s."""
        return self.count * self.gbps / 8


class NodeType(Record, frozen=True):
    """A server: `gpus` devices that share one NVLink (or xGMI) domain. `fixed`: its cooling is made up for a purpose
    that the file names, and no fit changes it."""

    name: str
    device: str
    gpus: Count
    height_u: Count
    numa: tuple[tuple[int, ...], ...]
    nic: Nic
    cooling: Cooling
    host_w: NonNegative
    power_max_w: Positive
    fixed: bool = False
