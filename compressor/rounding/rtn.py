"""Round to nearest: no calibration data needed."""

from typing import Literal

import torch
from torch import Tensor

from compressor.formats import Format, QuantizedWeight, absmax_scale, mse_scale, quantize

Scales = Literal["mse", "absmax"]


def rtn(
    weight: Tensor,
    fmt: Format,
    *,
    scales: Scales = "mse",
    importance: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedWeight:
    """Nearest codes of ``weight`` [out, in] at searched (``mse``) or absmax scales."""
    if scales == "absmax":
        scale = absmax_scale(weight, fmt, scale_dtype)
    else:
        scale = mse_scale(weight, fmt, importance, scale_dtype)
    return QuantizedWeight(quantize(weight, scale, fmt), scale, fmt)
