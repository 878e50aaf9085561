"""Does repeated inference take ever more memory? A robust line through what is alive after each run.

The slope is Theil and Sen's (the median of all pairwise slopes) with its confidence bound (Sen 1968,
``scipy.stats.theilslopes``), so that one garbage collection or a buffer that is made once does not count. The first
third of the runs is left out: caches fill there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.99
# Resident memory moves without any leak, as allocators keep pages: what it has to grow by in each run, and in all.
_NOISE_PER_RUN, _NOISE_IN_ALL = 16 * 1024, 2 * 2**20

# What is counted -> whether it is exact: nothing but a leak moves it from run to run.
COUNTERS = {"live tensors": True, "live tensor bytes": True, "device bytes": True, "resident bytes": False}


@dataclass(frozen=True)
class Growth:
    """Of one counter, in its unit per run; ``low`` and ``high`` bound the slope with 99 % confidence."""

    counter: str
    slope: float
    low: float
    high: float
    leak: bool


def growth(counter: str, values: Sequence[float]) -> Growth:
    """Fit ``values`` after successive runs. Raises ValueError with fewer than nine: too few for a bound."""
    if len(values) < 9:
        raise ValueError(f"{len(values)} runs are too few to tell a leak from chance: use 9 or more")
    y = np.asarray(values[len(values) // 3 :], dtype=np.float64)
    slope, _, low, high = (float(v) for v in stats.theilslopes(y, np.arange(len(y)), CONFIDENCE))
    leak = low > 0
    if not COUNTERS[counter]:
        leak = low > _NOISE_PER_RUN and low * len(y) > _NOISE_IN_ALL
    return Growth(counter, slope, low, high, leak)


def growths(seen: Mapping[str, Sequence[float]]) -> list[Growth]:
    """Fit every counter of :func:`compressor.evaluation.alive.collect`."""
    return [growth(name, values) for name, values in seen.items()]
