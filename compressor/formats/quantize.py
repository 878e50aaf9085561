"""Scales, codes and back: the arithmetic of every format.

Everywhere a weight is [out, in], a scale is [out, groups] (one group when scales are per channel) and

    codes = clamp(round(weight / scale), qmin, qmax)        weight ≈ codes · scale

with symmetric grids, so no zero point is stored (the form that every engine loads).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.formats.format import FP8_MAX, Format

# A scale must be positive and finite in the dtype it is stored in; this is what an all-zero group gets.
_SMALLEST_SCALE = 2.0**-24
_CPU_CHUNK, _GPU_CHUNK = 2**16, 2**26  # weights per step of the scale search


@dataclass(frozen=True)
class QuantizedWeight:
    """``codes`` [out, in] (int8, or float8_e4m3fn for FP8) and ``scale`` [out, groups]."""

    codes: Tensor
    scale: Tensor
    format: Format

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight that an engine computes with, [out, in] in ``dtype``."""
        return dequantize(self.codes, self.scale, self.format, dtype)


def grouped(weight: Tensor, fmt: Format) -> Tensor:
    """View [out, in] as [out, groups, inputs per group]."""
    out_features, in_features = weight.shape
    return weight.reshape(out_features, fmt.groups(in_features), -1)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a scale to the dtype it will be stored in, kept in fp32, positive and finite."""
    limits = torch.finfo(dtype)
    smallest = max(_SMALLEST_SCALE, limits.smallest_normal)
    return scale.float().clamp(min=smallest, max=limits.max).to(dtype).float()


def absmax_scale(weight: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scale that maps the largest magnitude of each group to the end of the grid, [out, groups] fp32.

    Integers: absmax / ((qmax - qmin) / 2), the convention of compressed-tensors
    (``calculate_qparams``). FP8: absmax / 448. Values are representable in ``dtype``.
    """
    largest = grouped(weight.float(), fmt).abs().amax(-1)
    top = FP8_MAX if fmt.kind == "fp8" else (fmt.qmax - fmt.qmin) / 2
    return storable(largest / top, dtype)


def mse_scale(
    weight: Tensor,
    fmt: Format,
    importance: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    smallest: float | None = None,
) -> Tensor:
    """Scale of each group with the least weighted squared rounding error, [out, groups] fp32.

    Minimises Σ_j importance_j (w_j - s·clamp(round(w_j / s)))² over factors of the absmax scale, on a
    coarse grid and then a fine one around its best. ``importance`` [in] is non-negative: the diagonal
    of the layer's Hessian, or None for the plain squared error. The absmax scale is among the
    candidates, so the result is never worse than it.
    """
    if fmt.kind == "fp8":
        return absmax_scale(weight, fmt, dtype)  # a floating grid has the same relative error at any scale
    if smallest is None:
        smallest = {2: 0.3, 3: 0.45, 4: 0.55}.get(fmt.bits, 0.8)
    # Rows are independent. Few at a time stay in the processor's cache through all candidates, which is
    # ten times faster on a CPU; a GPU wants many.
    rows = max(1, (_CPU_CHUNK if weight.device.type == "cpu" else _GPU_CHUNK) // weight.shape[1])
    cost = None if importance is None else grouped(importance.float()[None], fmt)
    return torch.cat([_search(part, fmt, cost, dtype, smallest) for part in weight.split(rows)])


def _search(weight: Tensor, fmt: Format, cost: Tensor | None, dtype: torch.dtype, smallest: float) -> Tensor:
    full = absmax_scale(weight, fmt, dtype)
    blocks = grouped(weight.float(), fmt)
    best, best_error = full, _group_error(blocks, full, fmt, cost)
    step = (1.05 - smallest) / 16
    for factor in torch.linspace(smallest, 1.05, 17).tolist():
        best, best_error = _keep_better(blocks, storable(full * factor, dtype), best, best_error, fmt, cost)
    centre = best
    for offset in (-0.75, -0.5, -0.25, 0.25, 0.5, 0.75):
        candidate = storable(centre + offset * step * full, dtype)
        best, best_error = _keep_better(blocks, candidate, best, best_error, fmt, cost)
    return best


def _group_error(blocks: Tensor, scale: Tensor, fmt: Format, cost: Tensor | None) -> Tensor:
    codes = (blocks / scale[..., None]).round_().clamp_(fmt.qmin, fmt.qmax)
    error = codes.mul_(scale[..., None]).sub_(blocks).square_()
    return (error if cost is None else error.mul_(cost)).sum(-1)


def _keep_better(
    blocks: Tensor, candidate: Tensor, best: Tensor, best_error: Tensor, fmt: Format, cost: Tensor | None
) -> tuple[Tensor, Tensor]:
    error = _group_error(blocks, candidate, fmt, cost)
    better = error < best_error
    return torch.where(better, candidate, best), torch.where(better, error, best_error)


def on_grid(values: Tensor, fmt: Format) -> Tensor:
    """The codes nearest to ``values``, which are in units of the scale, as fp32; any shape."""
    if fmt.kind == "fp8":
        return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return values.round().clamp_(fmt.qmin, fmt.qmax)


def quantize(weight: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Nearest codes, [out, in] int8 or float8_e4m3fn."""
    codes = on_grid(grouped(weight.float(), fmt) / scale.float()[..., None], fmt)
    return codes.reshape(weight.shape).to(fmt.code_dtype)


def dequantize(codes: Tensor, scale: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """codes · scale, computed in fp32 and rounded once to ``dtype``, [out, in]."""
    return (grouped(codes.float(), fmt) * scale.float()[..., None]).reshape(codes.shape).to(dtype)


def fake_quantize(weight: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """The nearest representable weight, in the dtype of ``weight``."""
    return dequantize(quantize(weight, scale, fmt), scale, fmt, weight.dtype)


def fake_quantize_activations(x: Tensor, fmt: Format) -> Tensor:
    """What the engine sees of a layer input under dynamic per-token quantization.

    ``x`` is [..., in]; one scale per token: absmax / 127.5 for INT8 (compressed-tensors), absmax / 448
    for FP8. Returns ``x`` unchanged for weight-only formats.
    """
    if fmt.activations is None:
        return x
    top = FP8_MAX if fmt.activations == "fp8" else 127.5
    values = x.float()
    scale = (values.abs().amax(-1, keepdim=True) / top).clamp_(min=torch.finfo(torch.float32).eps)
    if fmt.activations == "fp8":
        codes = (values / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    else:
        codes = (values / scale).round_().clamp_(-128, 127)
    return (codes * scale).to(x.dtype)


def kv_scale(largest: Tensor) -> Tensor:
    """The fp32 scale of an FP8 cache whose keys or values are at most ``largest`` in magnitude: largest / 448."""
    return storable(largest / FP8_MAX, torch.float32)


def fake_quantize_kv(x: Tensor, scale: float) -> Tensor:
    """Keys or values as they come back from an FP8 cache: E4M3 codes of x / scale, clamped to ±448, times ``scale``."""
    codes = (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return (codes * scale).to(x.dtype)
