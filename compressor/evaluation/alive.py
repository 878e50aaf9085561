"""What this process holds in memory. Needs torch and psutil only, so that an engine's interpreter can run it too."""

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch


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


def collect(infer: Callable[[], object], runs: int, device: torch.device) -> dict[str, list[float]]:
    """Call ``infer`` ``runs`` times; what is alive after each, by counter."""
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
    return seen


def reset_peak(device: torch.device) -> None:
    """Forget what loading took."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is resident now


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the peak since :func:`reset_peak`: of the GPU's allocator, or resident in the process; None where the
    system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
