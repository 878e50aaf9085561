"""Checks of a checkpoint by itself: config ⇔ tensors ⇔ plan.

Each returns what it found in one line, or raises Failed or Skipped with one.
"""

import json
import math

import torch

from compressor.checkpoint import kv_cache
from compressor.checkpoint.artifact import Artifact, group_finder, is_class, is_ignored
from compressor.checkpoint.compressed_tensors import (
    decode,
    format_of_scheme,
    scheme,
    storage_format,
    stored_tensors,
)
from compressor.checkpoint.sidecar import Sidecar
from compressor.formats import QuantizedWeight, parse_format
from compressor.graph.units import fused
from compressor.sources.tensors import INDEX, file_sha256, read_tensor

_NO_SIDECAR = "no compression.json"


class Failed(Exception):
    """A check found the checkpoint wrong; the message is one line and names what is at fault."""


class Skipped(Exception):
    """A check could not be made; the message says why."""


def plan_of(artifact: Artifact) -> Sidecar:
    """The sidecar. Raises Skipped without one."""
    if artifact.sidecar is None:
        raise Skipped(_NO_SIDECAR)
    return artifact.sidecar


def check_index(artifact: Artifact) -> str:
    """No weights beside those that the index lists; its total is theirs. (That every listed tensor is stored
    was established by opening it.)"""
    files = {entry.file for entry in artifact.tensors.values()}
    for file in sorted(artifact.path.glob("*.safetensors")):
        if file not in files:
            raise Failed(f"{file.name}: holds weights that the index does not list")
    total = sum(entry.nbytes for entry in artifact.tensors.values())
    index = artifact.path / INDEX
    if index.exists():
        stated = json.loads(index.read_text("utf-8")).get("metadata", {}).get("total_size")
        if stated is not None and stated != total:
            raise Failed(f"{INDEX}: total_size is {stated}, the tensors take {total} bytes")
    return f"{len(artifact.tensors)} tensors in {len(files)} files, {total:,} bytes"


def check_config(artifact: Artifact) -> str:
    """``quantization_config`` is one that compressed-tensors accepts and describes compressed weights."""
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig

    quantization = artifact.quantization
    try:
        QuantizationConfig.model_validate(quantization)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise Failed(f"config.json: compressed-tensors {compressed_tensors.__version__}: {reason}") from None
    if quantization.get("quantization_status") != "compressed":
        raise Failed(f"config.json: quantization_status is {quantization.get('quantization_status')!r}")
    stored = set()
    for name, group in quantization["config_groups"].items():
        fmt = format_of_scheme(group)
        if fmt is not None and group.get("format") not in (None, storage_format(fmt)):
            raise Failed(f"config.json: {name} is {fmt}, stored as {group['format']!r}")
        stored.add(group.get("format") or quantization.get("format"))
    expected = stored.pop() if len(stored) == 1 else "mixed-precision" if stored else "dense"
    if quantization.get("format") != expected:
        raise Failed(
            f"config.json: format is {quantization.get('format')!r}, its groups make it {expected!r}"
        )
    return f"valid for compressed-tensors {compressed_tensors.__version__}, {expected}"


def check_targets(artifact: Artifact) -> str:
    """Every quantized layer resolves to exactly one group, and every named target is a quantized layer."""
    quantization = artifact.quantization
    groups = quantization["config_groups"]
    for name, group in groups.items():
        for target in group["targets"]:
            if is_class(target):
                if artifact.sidecar is not None:
                    raise Failed(f"{name}: targets the class {target}, which engines understand differently")
            elif not target.startswith("re:") and target not in artifact.formats:
                raise Failed(f"{target}: is a target of {name}, but no quantized tensors are stored for it")
    find = group_finder(quantization)
    for layer in artifact.formats:
        if is_ignored(quantization, layer):
            raise Failed(f"{layer}: is ignored by the config, but quantized tensors are stored for it")
        found = find(layer)
        if len(found) != 1:
            raise Failed(
                f"{layer}: matches {len(found)} config groups{': ' if found else ''}{', '.join(found)}"
            )
    return f"{len(artifact.formats)} quantized layers, each in one of {len(groups)} groups"


def check_plan(artifact: Artifact) -> str:
    """The config gives every layer the plan's format, and nothing else is quantized."""
    plan = plan_of(artifact).plan
    planned = {name: parse_format(a.format) for name, a in plan.quantized().items()}
    for layer, fmt in planned.items():
        if layer not in artifact.formats:
            raise Failed(f"{layer}: planned as {fmt}, but no quantized tensors are stored for it")
        if artifact.formats[layer] != fmt:
            raise Failed(f"{layer}: planned as {fmt}, the config makes it {artifact.formats[layer]}")
    for layer in artifact.formats:
        if layer not in planned:
            raise Failed(f"{layer}: quantized, but not in the plan")
    for name, group in artifact.quantization["config_groups"].items():
        named = format_of_scheme(group)
        if named is not None and {k: v for k, v in group.items() if k != "targets"} != scheme(named):
            raise Failed(f"config.json: {name}: has keys besides those of {named}")
    return f"{len(planned)} layers as planned"


def check_tensors(artifact: Artifact) -> str:
    """Each layer holds exactly the tensors of its format, in dtype and shape, and none of another's."""
    unknown = 0
    for layer, fmt in artifact.formats.items():
        entries = artifact.by_layer[layer]
        if "weight" in entries and "weight_packed" in entries:
            raise Failed(f"{layer}: holds both weight and weight_packed")
        if "weight_g_idx" in entries:
            raise Failed(f"{layer}: holds weight_g_idx, which vLLM no longer reads")
        if fmt is None:
            unknown += 1
            continue
        out_features, in_features = _shape(artifact, layer)
        if not fmt.fits(in_features):
            raise Failed(f"{layer}: {fmt} does not divide its {in_features} inputs")
        expected = stored_tensors(fmt, out_features, in_features)
        for leaf, (dtype, shape) in expected.items():
            entry = entries.get(leaf)
            if entry is None:
                raise Failed(f"{layer}: {fmt} needs {leaf}, which is not stored")
            if entry.shape != shape:
                raise Failed(f"{layer}.{leaf}: shape {list(entry.shape)}, {fmt} makes it {list(shape)}")
            if entry.dtype != dtype and not (dtype is None and entry.dtype in ("BF16", "F16", "F32")):
                raise Failed(
                    f"{layer}.{leaf}: dtype {entry.dtype}, {fmt} makes it {dtype or 'floating point'}"
                )
        extra = sorted(set(entries) - set(expected) - {"bias"})
        if extra:
            raise Failed(f"{layer}: holds {extra[0]}, which {fmt} has no place for")
    checked = len(artifact.formats) - unknown
    return f"{checked} layers" + (
        f"; {unknown} of schemes without a name here not checked" if unknown else ""
    )


def check_values(artifact: Artifact) -> str:
    """Every float is finite, every scale positive, every code decodes to a finite weight."""
    for name, entry in artifact.tensors.items():
        if not entry.torch_dtype.is_floating_point:
            continue
        values = read_tensor(entry).float()
        if not bool(torch.isfinite(values).all()):
            raise Failed(f"{name}: holds {int((~torch.isfinite(values)).sum())} inf or NaN values")
        if name.endswith(".weight_scale") and not bool((values > 0).all()):
            raise Failed(f"{name}: {int((values <= 0).sum())} of its scales are not positive")
    for layer, fmt in artifact.formats.items():
        if fmt is None:
            continue
        weight = decoded(artifact, layer).dequantize(torch.float32)
        if not bool(torch.isfinite(weight).all()):
            raise Failed(f"{layer}: a code times its scale is not finite")
    return f"{len(artifact.tensors)} tensors"


def check_kv_cache(artifact: Artifact) -> str:
    """Scales of a quantized cache: one of keys and one of values for each planned layer, finite and positive, and declared."""
    scales = kv_cache.read_scales(artifact.tensors)
    scheme = artifact.quantization.get("kv_cache_scheme")
    if not scheme:
        if scales:
            raise Failed(f"{next(iter(scales))}: has k_scale, but config.json has no kv_cache_scheme")
        return "not quantized"
    wrong = [key for key, value in kv_cache.SCHEME.items() if scheme.get(key, value) != value]
    if wrong:
        raise Failed(
            f"config.json: kv_cache_scheme: {wrong[0]} is {scheme[wrong[0]]!r}, not {kv_cache.SCHEME[wrong[0]]!r}"
        )
    if not scales:
        raise Failed("config.json has a kv_cache_scheme, but no k_scale is stored")
    for layer, pair in scales.items():
        for leaf, value in zip(kv_cache.LEAVES, pair, strict=True):
            if not 0 < value < math.inf:
                raise Failed(f"{layer}.{leaf}: is {value}, and a scale is positive and finite")
    planned = artifact.sidecar.kv_cache if artifact.sidecar is not None else None
    if artifact.sidecar is not None and scales != planned:
        differing = sorted(set(scales) ^ set(planned or {})) or list(scales)
        raise Failed(f"{differing[0]}: its scales are not those of compression.json")
    return f"{len(scales)} attention layers, FP8"


def check_fused(artifact: Artifact) -> str:
    """Layers that engines fuse share one format, or none is quantized."""
    checked = 0
    for unit, _, layers in fused(artifact.by_layer):
        if len(layers) == 1:
            continue
        checked += 1
        formats = {layer: artifact.formats.get(layer, "unquantized") for layer in layers}
        if len(set(formats.values())) > 1:
            parent = unit.rpartition(".")[0]
            listed = ", ".join(f"{layer.removeprefix(f'{parent}.')} {f}" for layer, f in formats.items())
            raise Failed(f"{parent}: engines fuse {listed}, which need one format")
    return f"{checked} fused groups"


def check_size(artifact: Artifact) -> str:
    """The weights take the bytes that the plan says, within 1 %."""
    plan = plan_of(artifact).plan
    planned = real = 0
    worst = ("", 0)
    for layer, assignment in plan.layers.items():
        entries = artifact.by_layer.get(layer)
        if assignment.bytes is None or entries is None:
            continue  # an output embedding may be stored under another name, and other checks miss what is missing
        size = sum(entry.nbytes for leaf, entry in entries.items() if leaf.startswith("weight"))
        planned += assignment.bytes
        real += size
        if abs(size - assignment.bytes) > worst[1]:
            worst = (layer, abs(size - assignment.bytes))
    if not planned:
        raise Skipped("the plan states no sizes")
    if abs(real - planned) > 0.01 * planned:
        raise Failed(f"{real:,} bytes of weights, {planned:,} planned; {worst[0]} is off by {worst[1]:,}")
    return f"{real:,} bytes of weights, {planned:,} planned"


def check_digests(artifact: Artifact) -> str:
    """The weight files are byte for byte what was written."""
    files = plan_of(artifact).files
    if not files:
        raise Skipped("compression.json lists no weight files")
    for name, digest in files.items():
        file = artifact.path / name
        if not file.is_file():
            raise Failed(f"{name}: missing")
        if file_sha256(file) != digest:
            raise Failed(f"{name}: its bytes are not those that were written")
    return f"SHA-256 of {len(files)} files"


def _shape(artifact: Artifact, layer: str) -> tuple[int, int]:
    """[out, in] of a quantized layer, from its ``weight_shape`` or its codes."""
    entries = artifact.by_layer[layer]
    if "weight_shape" in entries:
        shape = tuple(read_tensor(entries["weight_shape"]).tolist())
    elif "weight" in entries:
        shape = entries["weight"].shape
    else:
        raise Failed(f"{layer}: holds a scale, but neither weight_packed with weight_shape nor weight")
    if len(shape) != 2 or min(shape) < 1:
        raise Failed(f"{layer}: its weight has the shape {list(shape)}, not [out, in]")
    return shape


def decoded(artifact: Artifact, layer: str) -> QuantizedWeight:
    """A layer's codes and scale. Raises Failed when its tensors do not fit together, Skipped for a scheme
    that compressor has no name for."""
    fmt = artifact.formats[layer]
    if fmt is None:
        raise Skipped(f"{layer}: its scheme has no name here")
    try:
        weight = decode(layer, artifact.read(layer), fmt)
        weight.dequantize(torch.float32)
    except (KeyError, RuntimeError, ValueError):
        raise Failed(f"{layer}: its tensors do not fit together as {fmt}") from None
    return weight
