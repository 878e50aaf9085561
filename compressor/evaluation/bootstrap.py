"""Intervals by paired bootstrap over sequences.

Tokens of one sequence are dependent, sequences are not, so whole sequences are resampled (the cluster
bootstrap). Every metric is computed from the same resampled sequences, which keeps baseline and
compressed paired. A metric is a function of sums over the resample, never a mean of per-sequence
means: sequences may hold unequal numbers of tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
_BLOCK = 1 << 23  # weights drawn at a time: 64 MiB of int64


@dataclass(frozen=True)
class Estimate:
    """A value and its confidence interval; ``low`` and ``high`` are None when one sequence gives no interval."""

    value: float
    low: float | None
    high: float | None


def resample_sums(columns: Mapping[str, Floats], *, resamples: int, seed: int) -> dict[str, Floats]:
    """Sums of each per-sequence column over bootstrap resamples.

    ``columns`` maps names to float64 [n]; each result is float64 [resamples]. Row r of all results
    comes from the same n sequences drawn with replacement.
    """
    table = np.stack([np.asarray(column, dtype=np.float64) for column in columns.values()], axis=1)
    n = table.shape[0]
    rng = np.random.default_rng(seed)
    sums = np.empty((resamples, table.shape[1]))
    block = max(1, _BLOCK // n)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        # How often each sequence is drawn; a multinomial draw is n draws with replacement, counted.
        weights = rng.multinomial(n, np.full(n, 1.0 / n), size=rows)
        sums[start : start + rows] = weights @ table
    return {name: sums[:, i] for i, name in enumerate(columns)}


def interval(samples: Floats, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The expanded percentile interval of bootstrap ``samples`` from ``n`` sequences.

    The plain percentile interval is too narrow for small n, by about sqrt((n-1)/n) and by using a
    normal in place of Student's t. Hesterberg (2015, "What Teachers Should Know About the Bootstrap",
    section 4.1.2) widens its tails to alpha' = Phi(-sqrt(n/(n-1)) * t[alpha/2, n-1]); for n = 32 the
    2.5 % tail becomes 1.9 %.
    """
    tail = stats.norm.cdf(np.sqrt(n / (n - 1)) * stats.t.ppf((1 - confidence) / 2, n - 1))
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


def estimate(
    statistic: Callable[[Mapping[str, Floats]], Floats],
    columns: Mapping[str, Floats],
    sums: Mapping[str, Floats],
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Evaluate ``statistic`` on the totals of ``columns`` and on the resampled ``sums``.

    ``statistic`` takes sums by name, each [k], and gives [k] values, for example
    ``lambda s: np.exp(s["nll"] / s["count"])``.
    """
    n = len(next(iter(columns.values())))
    totals = {name: np.asarray([column.sum()], dtype=np.float64) for name, column in columns.items()}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        value = float(statistic(totals)[0])
        if n < 2:
            return Estimate(value, None, None)
        low, high = interval(statistic(sums), n, confidence)
    return Estimate(value, low, high)
