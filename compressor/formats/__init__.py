"""Numeric formats: names, grids, scales, codes, bytes."""

from compressor.formats.format import DENSE, GROUP_SIZES, Format, fitting, parse_format, stored_bytes
from compressor.formats.quantize import (
    QuantizedWeight,
    absmax_scale,
    dequantize,
    fake_quantize,
    fake_quantize_activations,
    fake_quantize_kv,
    kv_scale,
    mse_scale,
    quantize,
)

__all__ = [
    "DENSE",
    "GROUP_SIZES",
    "Format",
    "QuantizedWeight",
    "absmax_scale",
    "dequantize",
    "fake_quantize",
    "fake_quantize_activations",
    "fake_quantize_kv",
    "fitting",
    "kv_scale",
    "mse_scale",
    "parse_format",
    "quantize",
    "stored_bytes",
]
