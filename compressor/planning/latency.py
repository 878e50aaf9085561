"""How long a unit's matrix product takes: measured tables, or a roofline for GPUs that are not at hand.

Roofline (Williams et al. 2009): a product of M tokens with a matrix takes the larger of the time to read the
weights, bytes ÷ memory bandwidth, and the time to multiply, 2·M·out·in ÷ peak rate. Decoding (M = 1 to a few)
is bound by the first, prefill by the second. Weight-only formats multiply at the 16-bit rate.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import UsageError
from compressor.formats import parse_format


@dataclass(frozen=True)
class Gpu:
    """Data-sheet peaks: bytes per second, and dense operations per second in 16 bits, INT8 and FP8 (0: none)."""

    bandwidth: float
    half: float
    int8: float
    fp8: float


GPUS: dict[str, Gpu] = {
    "a10": Gpu(600e9, 125e12, 250e12, 0),
    "a100-40gb": Gpu(1555e9, 312e12, 624e12, 0),
    "a100-80gb": Gpu(2039e9, 312e12, 624e12, 0),
    "h100-pcie": Gpu(2000e9, 756e12, 1513e12, 1513e12),
    "h100-sxm": Gpu(3350e9, 989e12, 1979e12, 1979e12),
    "h200": Gpu(4800e9, 989e12, 1979e12, 1979e12),
    "l4": Gpu(300e9, 121e12, 242e12, 242e12),
    "l40s": Gpu(864e9, 362e12, 733e12, 733e12),
    "rtx-4090": Gpu(1008e9, 165e12, 330e12, 330e12),
}


@dataclass(frozen=True)
class CostTable:
    """Seconds of one product of ``tokens`` tokens with a unit's matrix.

    ``measured`` maps (out_features, in_features, format) to seconds; ``gpu`` is used where there is none.
    """

    tokens: int
    measured: dict[tuple[int, int, str], float]
    gpu: Gpu | None
    source: str

    def seconds(self, out_features: int, in_features: int, fmt: str, size: int) -> float:
        """``size`` is the unit's bytes in that format. Raises UsageError for a shape the table lacks."""
        found = self.measured.get((out_features, in_features, fmt))
        if found is not None:
            return found
        if self.gpu is None:
            raise UsageError(
                f"{self.source}: no time for {fmt} at [{out_features}, {in_features}]: measure it with scripts/measure_costs.py"
            )
        return roofline(self.gpu, out_features, in_features, fmt, size, self.tokens)


def roofline(gpu: Gpu, out_features: int, in_features: int, fmt: str, size: int, tokens: int) -> float:
    """Seconds of one product; see the module."""
    peak = {"int8": gpu.int8, "fp8": gpu.fp8}.get(parse_format(fmt).activations or "", 0.0) or gpu.half
    return max(size / gpu.bandwidth, 2 * tokens * out_features * in_features / peak)


def gpu_costs(name: str, tokens: int) -> CostTable:
    """The roofline of a named GPU. Raises UsageError for an unknown one."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise UsageError(
            f"--gpu {name}: known are {', '.join(GPUS)}; or measure with scripts/measure_costs.py"
        )
    return CostTable(tokens, {}, gpu, f"roofline of {name.lower()}")


def read_costs(file: Path) -> CostTable:
    """A table that ``scripts/measure_costs.py`` wrote. Raises UsageError when it is not one."""
    try:
        data = json.loads(file.read_text("utf-8"))
        if data["artifact"] != "costs" or data["version"] != 1:
            raise ValueError
        entries = {
            (int(e["out_features"]), int(e["in_features"]), str(e["format"])): float(e["seconds"])
            for e in data["entries"]
        }
        return CostTable(int(data["tokens"]), entries, None, str(file))
    except OSError as error:
        raise UsageError(f"--costs {file}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"--costs {file}: not a cost table of scripts/measure_costs.py") from None
