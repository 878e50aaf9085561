"""What a plan may use: bytes, bits per weight, a share of the original, or time."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from compressor.errors import UsageError
from compressor.planning.latency import CostTable
from compressor.sensitivity.schema import FormatScore, Sensitivity, UnitScores

_SIZE = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True)
class Budget:
    """``limit`` in the unit of ``kind``: bytes of the whole checkpoint, stored bits per weight over all units
    (scales included), or seconds in the units' matrix products."""

    kind: Literal["bytes", "bits", "latency"]
    limit: float
    text: str

    def show(self, value: float) -> str:
        """``value`` as a budget one could ask for, rounded up to four digits so that it suffices."""

        def up(number: float) -> str:
            step = 10.0 ** (math.floor(math.log10(number)) - 3) if number > 0 else 1.0
            return f"{math.ceil(number / step - 1e-6) * step:.4g}"

        match self.kind:
            case "bits":
                return f"{up(value)}bits"
            case "latency":
                return f"latency:{up(value * 1e3)}ms"
            case _:
                return f"{up(value / 1e6)}MB"


def parse_budget(text: str, scan: Sensitivity) -> Budget:
    """``4.5bits``, ``120MB`` (also kB, GB, MiB, …), ``60%`` of the original checkpoint, ``latency:12ms``.

    Raises UsageError for anything else.
    """
    key = text.strip().lower().replace(" ", "")
    if found := re.fullmatch(r"latency:(\d+\.?\d*|\.\d+)(us|ms|s)", key):
        return Budget("latency", float(found[1]) * _TIME[found[2]], text)
    if found := re.fullmatch(r"(\d+\.?\d*|\.\d+)(bits?|%|[kmg]i?b|b)", key):
        value, unit = float(found[1]), found[2]
        if unit.startswith("bit"):
            return Budget("bits", value, text)
        if unit == "%":
            return Budget("bytes", value / 100 * scan.source_bytes, text)
        return Budget("bytes", value * _SIZE[unit], text)
    raise UsageError(f"--budget {text}: write 4.5bits, 120MB, 60% or latency:12ms")


def cost_of(budget: Budget, scan: Sensitivity, unit: UnitScores, name: str, table: CostTable | None) -> float:
    """What ``unit`` uses of the budget in the format ``name``."""
    score: FormatScore = unit.formats[name]
    match budget.kind:
        case "bits":
            return 8 * score.bytes / scan.parameters
        case "bytes":
            return float(score.bytes)
        case "latency":
            if table is None:
                raise UsageError(
                    f"--budget {budget.text}: needs --costs FILE (scripts/measure_costs.py) or --gpu NAME"
                )
            outputs = sum(layer.out_features for layer in unit.layers)
            return table.seconds(outputs, unit.layers[0].in_features, name, score.bytes)


def fixed_cost(budget: Budget, scan: Sensitivity) -> float:
    """What everything outside the units uses: kept layers, norms and biases for bytes, nothing otherwise."""
    if budget.kind != "bytes":
        return 0.0
    return float(scan.other_bytes + sum(layer.bytes for layer in scan.kept.values()))
