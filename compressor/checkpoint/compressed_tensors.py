"""Quantized weights as compressed-tensors stores them, and back.

One layer becomes a few named tensors (the format's names are those of compressed-tensors 0.17 to 0.20):

===================  ==============================================================================
``pack-quantized``   ``weight_packed`` int32 [out, ⌈in·bits/32⌉], ``weight_scale`` [out, groups],
(INT, weight-only)   ``weight_shape`` int64 [2]. A code q is stored as q + 2^(bits-1), lowest bits
                     first, dense across words.
``int-quantized``    ``weight`` int8 [out, in], ``weight_scale`` [out, 1]
(W8A8)
``float-quantized``  ``weight`` float8_e4m3fn [out, in], ``weight_scale`` [out, 1]
(FP8)
===================  ==============================================================================

Grids are symmetric, so there is no zero point (engines refuse one for symmetric schemes), and no
``weight_g_idx`` (removed from vLLM and from compressed-tensors).
"""

from collections.abc import Mapping
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor

from compressor.errors import UsageError
from compressor.formats import Format, QuantizedWeight, parse_format
from compressor.graph import ModelGraph
from compressor.plans import Plan


def scale_dtype(source_dtype: torch.dtype) -> torch.dtype:
    """The dtype that scales are stored in: float16 for float16 models, bfloat16 for all others.

    Engines compute in half precision, so a wider scale would be rounded when it is loaded.
    """
    return torch.float16 if source_dtype == torch.float16 else torch.bfloat16


def storage_format(fmt: Format) -> str:
    """The compressed-tensors name of how ``fmt`` is stored."""
    if fmt.kind == "fp8":
        return "float-quantized"
    return "pack-quantized" if fmt.activations is None else "int-quantized"


def encode(name: str, weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The stored tensors of the layer ``name``, on the CPU; ``dtype`` is :func:`scale_dtype`'s.

    Raises ValueError when a scale is not exactly representable in ``dtype``: rounding has to choose the
    codes with the scale that will be stored.
    """
    scale = weight.scale.to(dtype)
    if not torch.equal(scale.float(), weight.scale.float()):
        raise ValueError(f"{name}: its scale is not representable in {dtype}")
    if storage_format(weight.format) != "pack-quantized":
        tensors = {"weight": weight.codes, "weight_scale": scale}
    else:
        tensors = {
            "weight_packed": pack_to_int32(weight.codes, weight.format.bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
        }
    return {f"{name}.{key}": value.cpu().contiguous() for key, value in tensors.items()}


def decode(name: str, tensors: dict[str, Tensor], fmt: Format) -> QuantizedWeight:
    """The inverse of :func:`encode`; the scale comes back as float32.

    ``tensors`` may hold other layers' tensors as well. Raises KeyError when one of this layer's is missing.
    """
    scale = tensors[f"{name}.weight_scale"].float()
    if storage_format(fmt) != "pack-quantized":
        return QuantizedWeight(tensors[f"{name}.weight"], scale, fmt)
    shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
    codes = unpack_from_int32(tensors[f"{name}.weight_packed"], fmt.bits, shape)
    return QuantizedWeight(codes, scale, fmt)


def stored_tensors(
    fmt: Format, out_features: int, in_features: int
) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    """What a layer of this format is stored as: name in the layer -> (safetensors dtype, shape).

    The dtype of a scale is None: any floating-point one is valid.
    """
    tensors: dict[str, tuple[str | None, tuple[int, ...]]] = {
        "weight_scale": (None, (out_features, fmt.groups(in_features)))
    }
    if storage_format(fmt) == "pack-quantized":
        words = -(-in_features * fmt.bits // 32)
        tensors["weight_packed"] = ("I32", (out_features, words))
        tensors["weight_shape"] = ("I64", (2,))
    else:
        tensors["weight"] = ("F8_E4M3" if fmt.kind == "fp8" else "I8", (out_features, in_features))
    return tensors


def quantization_config(
    plan: Plan,
    graph: ModelGraph,
    stored_as: Mapping[str, str] | None = None,
    kv_cache: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``quantization_config`` of ``config.json``: one group per format, every layer by its full name.

    Targets are exact names, so that no layer can match two groups and no rule of precedence (in which
    compressed-tensors and vLLM differ) ever decides; vLLM translates exact names, but not regular
    expressions, where it renames modules. ``ignore`` names all that stays as it is, including a tied
    head, and by the names in ``stored_as`` too where the checkpoint has other ones than transformers. Targets have the
    names in memory alone: transformers goes by these and warns of all others, and vLLM translates them. transformers
    takes the first group for that of the experts. ``kv_cache`` is the scheme of keys and values. Only keys that
    compressed-tensors 0.17 knows are written.
    """
    experts = {layer.name for layer in graph.layers if layer.form == "expert"}
    targets: dict[str, list[str]] = {}
    for name, assignment in plan.quantized().items():
        targets.setdefault(parse_format(assignment.format).name, []).append(name)
    groups = {}
    ordered = sorted(targets.items(), key=lambda group: (experts.isdisjoint(group[1]), group[0]))
    for index, (name, layers) in enumerate(ordered):
        groups[f"group_{index}"] = {"targets": layers, **scheme(parse_format(name))}
    stored = sorted({group["format"] for group in groups.values()})
    ignore = list(plan.kept())
    if graph.head and graph.head not in plan.layers:
        ignore.append(graph.head)
    ignore += [(stored_as or {})[name] for name in ignore if name in (stored_as or {})]
    return {
        "quant_method": "compressed-tensors",
        "version": compressed_tensors.__version__,
        "format": stored[0] if len(stored) == 1 else "mixed-precision" if stored else "dense",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": dict(kv_cache) if kv_cache else None,
        "global_compression_ratio": None,
    }


def scheme(fmt: Format) -> dict[str, Any]:
    """A compressed-tensors ``QuantizationScheme`` without its targets."""
    kind = "float" if fmt.kind == "fp8" else "int"
    weights = {
        "num_bits": fmt.bits,
        "type": kind,
        "symmetric": True,
        "strategy": "channel" if fmt.group_size is None else "group",
        "group_size": fmt.group_size,
        "dynamic": False,
    }
    inputs = None
    if fmt.activations is not None:
        inputs = {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
        }
    return {
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": storage_format(fmt),
    }


def format_of_scheme(group: dict[str, Any]) -> Format | None:
    """The format that a config group describes; None for one that compressor has no name for."""
    weights = group.get("weights") or {}
    inputs = group.get("input_activations")
    bits, size = weights.get("num_bits"), weights.get("group_size")
    for name in ("fp8", "w8a8", f"w{bits}" if size in (None, -1) else f"w{bits}g{size}"):
        try:
            fmt = parse_format(name)
        except UsageError:
            continue
        if _same(scheme(fmt)["weights"], weights) and _same(scheme(fmt)["input_activations"], inputs):
            return fmt
    return None


def _same(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    size = theirs.get("group_size")
    theirs = {"symmetric": True, "dynamic": False, **theirs, "group_size": None if size == -1 else size}
    return all(theirs.get(key) == value for key, value in ours.items())
