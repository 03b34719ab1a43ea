"""Where every temperature will be in the coming minutes, with a band, and which GPUs will slow themselves when.

Under constant power the network relaxes exponentially, so that any moment of the future has a closed form, and so has
the moment of a crossing. The band comes from the twin's covariance, carried to that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.model import observer, thermal
from engine.model.observer import C_SINK, DRIFT, INLET, POWER_S, PREHEAT, R_DIE, R_SINK, SINK, Twin
from engine.model.thermal import FLOW_EXPONENT

Floats = npt.NDArray[np.float64]

HORIZON_S = 600.0
TIMES_S = np.array([0, 10, 20, 30, 45, 60, 90, 120, 180, 240, 300, 420, 600], float)
NINE_OF_TEN = 1.645
"""Standard deviations that hold nine of ten outcomes."""
FORM_SHARE, FORM_K = 0.012, 0.15
"""What two nodes cannot show of a real heatsink: a share of the rise above the air, and K in any case."""


@dataclass(frozen=True)
class Forecast:
    """`celsius`, `low` and `high` (n GPUs, k times) at `times_s` from now; `reaches_s` when each GPU reaches its limit,
    infinity where it does not within the horizon; `settled_c` without any limiter, with its standard deviation."""

    times_s: Floats
    celsius: Floats
    low: Floats
    high: Floats
    limit_c: Floats
    settled_c: Floats
    settled_sd: Floats
    reaches_s: Floats


def forecast(
    twin: Twin,
    power_w: Floats,
    limit_c: Floats,
    feedback_w_k: Floats | float = 0.0,
    power_sd_w: Floats | float | None = None,
    times_s: Floats = TIMES_S,
) -> Forecast:
    """Temperatures under `power_w` from now on. `feedback_w_k` is what power grows with temperature (leakage), W/K: nil
    where a power limit holds it. `power_sd_w` is how surely the power is known; by default as surely as a mean of what
    was measured is. `limit_c` is where each GPU begins to slow itself; above it no forecast goes."""
    chassis = observer.learned(twin)
    flow = thermal.flow_for(chassis, power_w)
    now = observer.junction_c(twin)
    r_die, r_sink = chassis.r_die, chassis.r_sink * flow**-FLOW_EXPONENT
    gain = np.clip((r_die + r_sink) * feedback_w_k, 0.0, 0.5)
    plain = thermal.steady(chassis, power_w).junction_c
    settled = np.where(twin.known, now + (plain - now) / (1 - gain), np.nan)
    watts = power_w + np.nan_to_num(settled - plain) / (r_die + r_sink)

    x = twin.x
    sink, slope = _ahead(twin, x, watts, r_sink, flow, times_s)
    mean = sink + (r_die * watts)[:, None]
    slope[:, :, R_DIE] = (r_die * watts)[:, None]
    variance = np.einsum("nkj,njl,nkl->nk", slope, twin.covariance, slope)
    reached = 1.0 - np.exp(-times_s / (r_sink * np.exp(x[:, C_SINK]))[:, None])
    sd_w = np.sqrt(twin.power_var / (2.0 * POWER_S)) if power_sd_w is None else power_sd_w
    per_watt = r_die[:, None] + r_sink[:, None] * reached
    form = FORM_SHARE * np.abs(settled - x[:, INLET])[:, None] * reached
    variance += (per_watt * np.reshape(sd_w, (-1, 1))) ** 2 + form**2 + FORM_K**2
    variance += DRIFT[INLET] ** 2 * times_s
    deviation = np.sqrt(variance)
    # Boards act on the peaks: microbatches make the die swing by what its resistance makes of the power's scatter.
    swing = r_die * np.sqrt(twin.power_var)
    reaches = _crossing(twin, settled, watts, r_die, r_sink, limit_c - swing)
    reaches = np.where(reaches <= HORIZON_S, reaches, np.inf)
    ceiling = limit_c[:, None] + 1.0
    return Forecast(
        times_s=times_s,
        celsius=np.minimum(mean, ceiling),
        low=np.minimum(mean - NINE_OF_TEN * deviation, ceiling),
        high=np.minimum(mean + NINE_OF_TEN * deviation, ceiling + 1.0),
        limit_c=limit_c,
        settled_c=settled,
        settled_sd=deviation[:, -1],
        reaches_s=np.where(now >= limit_c, 0.0, reaches),
    )


def _ahead(
    twin: Twin, x: Floats, watts: Floats, r_sink: Floats, flow: Floats, times_s: Floats
) -> tuple[Floats, Floats]:
    """Sink temperatures at each time, (n, k), and their slopes in the twin's states, (n, k, 6)."""
    front = twin.chassis.front
    warmed = np.where(front >= 0, np.exp(x[:, PREHEAT]) * watts[front] / flow, 0.0)[:, None]
    lag = times_s[None] / (r_sink * np.exp(x[:, C_SINK]))[:, None]
    left, rise = np.exp(-lag), (r_sink * watts)[:, None]
    away = x[:, SINK, None] - (x[:, INLET, None] + warmed + rise)
    slope = np.zeros((*lag.shape, 6))
    slope[:, :, SINK], slope[:, :, INLET] = left, 1 - left
    slope[:, :, R_SINK] = (1 - left) * rise + away * left * lag
    slope[:, :, C_SINK] = away * left * lag
    slope[:, :, PREHEAT] = (1 - left) * warmed
    return x[:, INLET, None] + warmed + rise + away * left, slope


def _crossing(twin: Twin, settled: Floats, watts: Floats, r_die: Floats, r_sink: Floats, limit_c: Floats) -> Floats:
    """Seconds until each junction passes its limit, infinity where it never does."""
    target = settled - r_die * watts
    start = twin.x[:, SINK]
    want = limit_c - r_die * watts
    with np.errstate(invalid="ignore", divide="ignore"):
        seconds = r_sink * np.exp(twin.x[:, C_SINK]) * np.log((target - start) / (target - want))
    never = ~(target > want)
    return np.where(never, np.inf, np.where(start >= want, 0.0, seconds))
