"""A quantized weight that can be learned: real-valued codes that are rounded straight through, and scales.

A weight is s · round(v), where v [out, groups, inputs per group] starts inside the rounding cell of the codes it is
made from, as near to the original weight as that allows: it computes what those codes compute, and a weight
that was rounded far lies near the border. AdaRound (Nagel et al. 2020, arXiv 2004.10568) lets a weight choose
between its two neighbours; here v may go further, and the gradient passes the rounding unchanged (Bengio et al.
2013, arXiv 1308.3432). The scale's gradient is that of LSQ (Esser et al. 2020, arXiv 1902.08153) for fixed v.
"""

from typing import Any

import torch
from torch import Tensor

from compressor.formats import Format, QuantizedWeight
from compressor.formats.format import FP8_MAX
from compressor.formats.quantize import grouped, on_grid, storable

# How near to the border of its rounding cell a value may begin, in steps.
_INSIDE = 0.49


class LearnedWeight:
    """``values`` [out, groups, inputs per group] in code units and ``factor`` [out, groups] relative to the first
    scale, both fp32 leaves for an optimizer. Integer formats only."""

    def __init__(self, weight: QuantizedWeight, original: Tensor, scale_dtype: torch.dtype) -> None:
        self.format: Format = weight.format
        self._shape = weight.codes.shape
        self._scale_dtype = scale_dtype
        self._start = (
            weight.scale.float().clone()
        )  # calibration makes inference tensors, which autograd refuses
        self.values = inside_cells(original, weight, _INSIDE).requires_grad_(True)
        self.factor = torch.ones_like(self._start).requires_grad_(True)

    def __call__(self) -> Tensor:
        """The quantized weight [out, in], fp32, differentiable."""
        return rounded(self.values, self.factor, self._start, self.format, self._scale_dtype).view(
            self._shape
        )

    @torch.no_grad()
    def keep_in_range(self) -> None:
        """Move values that an optimizer step took off the grid back to its ends."""
        self.values.clamp_(self.format.qmin, self.format.qmax)

    @torch.no_grad()
    def quantized(self) -> QuantizedWeight:
        """What is computed with now, as it will be stored."""
        codes = self.values.round().view(self._shape).to(self.format.code_dtype)
        return QuantizedWeight(codes, storable(self._start * self.factor, self._scale_dtype), self.format)


def inside_cells(original: Tensor, weight: QuantizedWeight, margin: float) -> Tensor:
    """Where the values of a ``weight`` in an integer format begin, [out, groups, inputs per group] fp32: at the
    ``original`` [out, in] as far as that is within ``margin`` steps of its codes, and on the grid."""
    fmt = weight.format
    codes = grouped(weight.codes.float(), fmt)
    wanted = grouped(original.float(), fmt) / weight.scale.float()[..., None]
    inside = torch.minimum(torch.maximum(wanted, codes - margin), codes + margin)
    return inside.clamp_(fmt.qmin, fmt.qmax)


def rounded(values: Tensor, factor: Tensor, start: Tensor, fmt: Format, scale_dtype: torch.dtype) -> Tensor:
    """codes · scale, [out, groups, inputs per group], with codes = ``values`` [out, groups, inputs per group] on the
    format's grid and scale = ``start`` · ``factor`` [out, groups] as it is stored.

    Gradients: the output's times the scale for values, but nothing for one that would leave the grid further; summed
    with the codes for factors.
    """
    return _Rounded.apply(values, factor, start, fmt, scale_dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, factor: Tensor, start: Tensor, fmt: Format, scale_dtype: torch.dtype
    ) -> Tensor:
        scale = storable(start * factor, scale_dtype)
        ctx.format = fmt
        ctx.save_for_backward(values, scale, start)
        return on_grid(values, fmt).mul_(scale[..., None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        values, scale, start = ctx.saved_tensors
        fmt: Format = ctx.format
        low, high = (-FP8_MAX, FP8_MAX) if fmt.kind == "fp8" else (fmt.qmin, fmt.qmax)
        for_values = for_factor = None
        if ctx.needs_input_grad[1]:
            for_factor = (gradient * on_grid(values, fmt)).sum(-1).mul_(start)
        if ctx.needs_input_grad[0]:
            # A step goes against the gradient.
            leaves = ((values >= high) & (gradient < 0)) | ((values <= low) & (gradient > 0))
            for_values = (gradient * scale[..., None]).masked_fill_(leaves, 0.0)
        return for_values, for_factor, None, None, None
