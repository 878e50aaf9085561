"""Does repeated inference take ever more memory? A robust line through what is alive after each run.

The slope is Theil and Sen's (the median of all pairwise slopes) with its confidence bound (Sen 1968,
``scipy.stats.theilslopes``), so that one garbage collection or a buffer that is made once does not count. The first
third of the runs is left out: caches fill there.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
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


def watch(infer: Callable[[], object], runs: int, device: torch.device) -> list[Growth]:
    """Call ``infer`` ``runs`` times and fit what is alive after each."""
    seen: dict[str, list[float]] = {}
    gc.collect()
    gc.freeze()  # what is there before, the model and all modules, is neither searched nor counted each time
    try:
        for _ in range(runs):
            infer()
            for name, value in alive(device).items():
                seen.setdefault(name, []).append(value)
    finally:
        gc.unfreeze()
    return [growth(name, values) for name, values in seen.items()]


def alive(device: torch.device) -> dict[str, float]:
    """Memory in use after a garbage collection: on a GPU as its allocator counts it, on a CPU that of the process;
    and the tensors that Python's collector knows, with the storages behind them counted once."""
    gc.collect()
    count, storages = 0, {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        count += 1
        try:
            storage = thing.untyped_storage()
            storages[storage.data_ptr(), str(thing.device)] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # meta tensors and the like have none
            continue
    found = {"live tensors": float(count), "live tensor bytes": float(sum(storages.values()))}
    if device.type == "cuda":
        return found | {"device bytes": float(torch.cuda.memory_allocated(device))}
    return found | {"resident bytes": float(psutil.Process().memory_info().rss)}
