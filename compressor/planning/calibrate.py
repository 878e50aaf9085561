"""From predicted to measured KL: a power law fitted to a few measured plans.

The second-order prediction is exact in the limit of small errors. Beyond it KL still grows as a power of it
over the range in which a model remains useful, so log measured = a + b · log predicted, monotone with b > 0. Few plans do not
fix a slope, and second order says 1: a ridge of weight 3 (in squared log units) holds b there until the plans spread
over more than that. On 21 measured plans of SmolLM2 it took the mean error of calibrations with four from 14 % to 10 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BREAKDOWN = 0.3
"""Relative error of the calibrated prediction beyond which the second-order model is not trusted."""


_RIDGE = 3.0


@dataclass(frozen=True)
class Point:
    """One measured plan: KL in nats per token, with the standard error of the measured one over sequences."""

    bits: float
    bytes: int
    predicted: float
    measured: float
    stderr: float


@dataclass(frozen=True)
class Calibration:
    """``measured ≈ exp(intercept) · predicted ** slope``; ``spread`` is the standard deviation of the log residuals."""

    intercept: float
    slope: float
    spread: float
    points: tuple[Point, ...]

    def __call__(self, predicted: float) -> float:
        """Calibrated KL in nats per token."""
        return float(np.exp(self.intercept) * predicted**self.slope) if predicted > 0 else 0.0

    def error(self, point: Point) -> float:
        """Calibrated over measured, minus one."""
        return self(point.predicted) / point.measured - 1 if point.measured > 0 else 0.0

    @property
    def broken(self) -> tuple[Point, ...]:
        """Plans whose KL even the calibrated prediction misses by more than 30 %."""
        return tuple(point for point in self.points if abs(self.error(point)) > BREAKDOWN)


def fit(points: Sequence[Point]) -> Calibration:
    """Least squares in logarithms over plans with positive KL; the identity when there is none."""
    usable = [p for p in points if p.predicted > 0 and p.measured > 0]
    if not usable:
        return Calibration(0.0, 1.0, 0.0, tuple(points))
    x = np.log([p.predicted for p in usable])
    y = np.log([p.measured for p in usable])
    spread_x = ((x - x.mean()) ** 2).sum()
    slope = float((((x - x.mean()) * (y - y.mean())).sum() + _RIDGE) / (spread_x + _RIDGE))
    slope = min(max(slope, 0.5), 2.0)
    intercept = float((y - slope * x).mean())
    residual = y - intercept - slope * x
    freedom = max(1, len(usable) - 1)
    return Calibration(intercept, slope, float(np.sqrt((residual**2).sum() / freedom)), tuple(points))
