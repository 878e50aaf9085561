"""Numeric formats: their names, grids and storage cost.

A format says how one weight matrix [out_features, in_features] is stored and, for formats that also
quantize activations, how the layer's input is. Names are short and stable, since they appear in
recipes, plans and reports:

==========  =======================================================  ==================================
name        weights                                                  compressed-tensors preset
==========  =======================================================  ==================================
``w4g128``  INT4 symmetric, one scale per 128 inputs                 W4A16 (also g64, g32, ``w4`` channel)
``w8``      INT8 symmetric, one scale per output channel             W8A16 with channel scales
``w8g128``  INT8 symmetric, one scale per 128 inputs                 W8A16
``w8a8``    INT8 per channel, inputs INT8 dynamically per token      W8A8 / INT8
``fp8``     FP8 E4M3 per channel, inputs FP8 dynamically per token   FP8_DYNAMIC
``bf16``    left as in the source, whatever its dtype                (not quantized)
==========  =======================================================  ==================================

Two to eight bits are accepted (``w3g32``, ``w2g64``, …); which of them an engine can load is the
business of :mod:`compressor.engines`.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from compressor.errors import UsageError

GROUP_SIZES = (128, 64, 32)
FP8_MAX = 448.0  # largest finite float8_e4m3fn


@dataclass(frozen=True)
class Format:
    """How a weight matrix is stored.

    ``group_size`` counts the inputs that share one scale; ``None`` is one scale per output channel.
    ``activations`` names the dynamic per-token quantization of the layer's input, if any.
    """

    name: str
    kind: Literal["int", "fp8", "dense"]
    bits: int
    group_size: int | None = None
    activations: Literal["int8", "fp8"] | None = None

    @property
    def quantized(self) -> bool:
        return self.kind != "dense"

    @property
    def qmin(self) -> int:
        """Smallest integer code."""
        return -(2 ** (self.bits - 1))

    @property
    def qmax(self) -> int:
        """Largest integer code."""
        return 2 ** (self.bits - 1) - 1

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.kind == "fp8" else torch.int8

    def groups(self, in_features: int) -> int:
        """Scales per output channel."""
        return 1 if self.group_size is None else in_features // self.group_size

    def fits(self, in_features: int) -> bool:
        """Whether the group size divides the layer's inputs."""
        return self.group_size is None or in_features % self.group_size == 0

    def __str__(self) -> str:
        return self.name


DENSE = Format("bf16", "dense", 16)

_INT_NAME = re.compile(r"w([2-8])(?:g(\d+))?")
_PRESETS = {
    "w4a16": "w4g128",
    "w8a16": "w8",
    "int8": "w8a8",
    "fp8_dynamic": "fp8",
    "fp8-dynamic": "fp8",
}


@cache
def parse_format(name: str) -> Format:
    """The format called ``name`` (case does not matter; presets such as ``W4A16`` are understood).

    Raises UsageError for anything else.
    """
    key = name.strip().lower()
    key = _PRESETS.get(key, key)
    match key:
        case "bf16" | "dense" | "none":
            return DENSE
        case "w8a8":
            return Format("w8a8", "int", 8, None, "int8")
        case "fp8":
            return Format("fp8", "fp8", 8, None, "fp8")
    found = _INT_NAME.fullmatch(key)
    if found and (found[2] is None or int(found[2]) in GROUP_SIZES):
        return Format(key, "int", int(found[1]), int(found[2]) if found[2] else None)
    raise UsageError(
        f"unknown format {name!r}: use w4g128, w4g64, w4g32, w4, w8, w8g128, w8a8, fp8 or bf16 "
        f"(group sizes {', '.join(map(str, GROUP_SIZES))}; w2 to w8)"
    )


def fitting(fmt: Format, *in_features: int) -> Format | None:
    """``fmt``, or the same with the largest smaller group size that divides all ``in_features``; else None."""
    if all(fmt.fits(inputs) for inputs in in_features):
        return fmt
    for size in GROUP_SIZES:
        if (
            fmt.group_size is not None
            and size < fmt.group_size
            and not any(inputs % size for inputs in in_features)
        ):
            return Format(f"w{fmt.bits}g{size}", fmt.kind, fmt.bits, size, fmt.activations)
    return None


def stored_bytes(
    fmt: Format, out_features: int, in_features: int, dense_bytes: int, scale_bytes: int = 2
) -> int:
    """Bytes that a weight of this format takes in the checkpoint.

    ``dense_bytes`` is the size of one element in the source. INT weight-only formats are packed in
    32-bit words along the inputs and carry a 16-byte ``weight_shape`` (compressed-tensors
    ``pack-quantized``); INT8 with quantized activations and FP8 are stored one byte an element.
    """
    if not fmt.quantized:
        return out_features * in_features * dense_bytes
    scales = out_features * fmt.groups(in_features) * scale_bytes
    if fmt.activations is not None:
        return out_features * in_features + scales
    words = -(-in_features * fmt.bits // 32)
    return out_features * words * 4 + scales + 16
