"""Round the layers of one unit together: same input, same Hessian, one matrix."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compressor.formats import Format, QuantizedWeight
from compressor.rounding.gptq import factorize, gptq, relative_error
from compressor.rounding.rtn import Scales, rtn

Method = Literal["rtn", "gptq"]


@dataclass(frozen=True)
class RoundedLayer:
    """One layer's result. Errors are shares of the layer's output energy on its calibration inputs
    (None without calibration): of the plain rounding, and of what was chosen."""

    weight: QuantizedWeight
    method: Method
    error_rtn: float | None = None
    error: float | None = None
    damping: float | None = None
    note: str | None = None


def round_unit(
    weights: list[Tensor],
    fmt: Format,
    hessian: Tensor | None,
    *,
    method: Method,
    scales: Scales,
    damping: float,
    scale_dtype: torch.dtype,
) -> list[RoundedLayer]:
    """Round ``weights`` (each [out, in], with the same in) to ``fmt``.

    ``hessian`` [in, in] is the mean of x xᵀ over the unit's calibration inputs. Without one, or when it
    holds no information, and for FP8 (whose steps follow the weights' own magnitudes), layers are
    rounded to nearest. A layer that GPTQ would leave worse than rounding to nearest gets the latter.
    """
    stacked = torch.cat([weight.float() for weight in weights])
    factor, note = None, None
    if method == "gptq" and fmt.kind == "int":
        factor = factorize(hessian, damping) if hessian is not None else None
        if factor is None:
            note = "no usable calibration data reached it: rounded to nearest"
        elif factor.damping > damping:
            note = f"damping raised to {factor.damping:g}"
    nearest = rtn(
        stacked, fmt, scales=scales, importance=factor.energy if factor else None, scale_dtype=scale_dtype
    )
    best = gptq(stacked, factor, fmt, scale_dtype=scale_dtype) if factor else None

    results = []
    start = 0
    for weight in weights:
        rows = slice(start, start + weight.shape[0])
        start = rows.stop
        plain = _rows(nearest, rows)
        error_rtn = (
            relative_error(weight, plain.dequantize(torch.float32), hessian) if hessian is not None else None
        )
        if best is None or hessian is None or error_rtn is None:
            results.append(RoundedLayer(plain, "rtn", error_rtn, error_rtn, None, note))
            continue
        chosen = _rows(best, rows)
        error = relative_error(weight, chosen.dequantize(torch.float32), hessian)
        assert factor is not None
        if error <= error_rtn:
            results.append(RoundedLayer(chosen, "gptq", error_rtn, error, factor.damping, note))
        else:
            worse = f"gptq was worse ({error:.3g} against {error_rtn:.3g}): rounded to nearest"
            results.append(RoundedLayer(plain, "rtn", error_rtn, error_rtn, factor.damping, worse))
    return results


def _rows(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    return QuantizedWeight(weight.codes[rows].contiguous(), weight.scale[rows].contiguous(), weight.format)
