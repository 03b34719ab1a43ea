"""Fitting: robust least squares with priors, in numpy: each parameter has one that the data must argue with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    """What is known of a parameter before any run is seen: its value and, in the scale it is fitted in, how surely.

    Positive quantities are fitted as logarithms (`spread` 0.1 is about 10 %), shares between 0 and 1 as logits.
    """

    value: float
    spread: float
    share: bool = False

    def inward(self, value: float) -> float:
        """The parameter in the scale it is fitted in."""
        if self.share:
            kept = min(max(value, 1e-3), 1 - 1e-3)
            return float(np.log(kept / (1 - kept)))
        return float(np.log(max(value, 1e-12)))

    def outward(self, x: float) -> float:
        """The parameter itself."""
        return float(1 / (1 + np.exp(-x))) if self.share else float(np.exp(x))


def robust(
    residuals: Callable[[Vector], Vector],
    jacobian: Callable[[Vector, Vector], npt.NDArray[np.float64]],
    start: Vector,
    centre: Vector,
    spread: Vector,
    weights: Vector,
    scale: float,
    rounds: int,
) -> Vector:
    """Minimise sum w rho(r / scale) + sum ((x - centre) / spread)^2 by damped, reweighted Gauss-Newton.

    rho is Student-t with 3 degrees of freedom (a source's odd row does not pull the curve), as iterated weights
    1/(1 + r^2/(3 s^2)). Damping as Marquardt 1963. `residuals` maps x to r; `jacobian` maps (x, r) to dr/dx.
    """
    x, damping = start.copy(), 1e-2

    def cost(r: Vector, at: Vector) -> float:
        loss = 2.0 * np.sum(weights * np.log1p((r / scale) ** 2 / 3.0))
        return float(loss + np.sum(((at - centre) / spread) ** 2))

    r = residuals(x)
    best = cost(r, x)
    for _ in range(rounds):
        j = jacobian(x, r)
        inner = weights / (1.0 + (r / scale) ** 2 / 3.0) / scale**2 * (4.0 / 3.0) / 2.0
        normal = j.T @ (inner[:, None] * j) + np.diag(1.0 / spread**2)
        slope = j.T @ (inner * r) + (x - centre) / spread**2
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope)
            tried = x + np.clip(step, -0.7, 0.7)
            r_tried = residuals(tried)
            now = cost(r_tried, tried)
            if now < best:
                gain, best, x, r = best - now, now, tried, r_tried
                damping = max(damping / 4, 1e-6)
                break
            damping *= 4
        else:
            break
        if gain < 1e-4 * max(best, 1.0):
            break
    return x
