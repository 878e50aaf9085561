"""Checks of a checkpoint against the model it was made from: what was not quantized has not changed.

Each returns what it found in one line, or raises Failed or Skipped with one.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from compressor.checkpoint import kv_cache
from compressor.checkpoint.artifact import Artifact
from compressor.checkpoint.carried_files import carried_files, carried_name
from compressor.checkpoint.coverage import coverage
from compressor.checkpoint.file_checks import Failed, decoded, plan_of
from compressor.checkpoint.safetensors_file import read_range
from compressor.graph import ModelGraph, Skeleton, build_skeleton, discover
from compressor.graph.attention import attention_layers
from compressor.sources.model import Source
from compressor.sources.tensors import TensorEntry, file_sha256

# Keys that a loader rewrites without changing the model.
_VERSION_KEYS = ("transformers_version", "dtype", "torch_dtype", "quantization_config")


@dataclass(frozen=True)
class Pair:
    """The checkpoint and its source."""

    artifact: Artifact
    source: Source

    @cached_property
    def skeleton(self) -> Skeleton:
        return build_skeleton(self.source)

    @cached_property
    def graph(self) -> ModelGraph:
        return discover(self.skeleton)

    @cached_property
    def originals(self) -> dict[str, TensorEntry]:
        """The source's weight of each quantized layer. Raises Failed for a layer that the source lacks."""
        found = {}
        for layer in self.artifact.formats:
            entry = self.skeleton.stored.get(f"{layer}.weight")
            if entry is None:
                raise Failed(f"{layer}: quantized, but the source has no weight of that name")
            found[layer] = entry
        return found


def check_source(pair: Pair) -> str:
    """The given source is the one that the checkpoint was made from."""
    files = plan_of(pair.artifact).source.files
    here = {file.name: file for file in pair.source.weight_files}
    if set(files) != set(here):
        raise Failed(f"{pair.source.path}: other weight files than the checkpoint was made from")
    for name, digest in files.items():
        if file_sha256(here[name]) != digest:
            raise Failed(f"{here[name]}: is not what the checkpoint was made from")
    return f"{pair.source.ref}: SHA-256 of {len(files)} weight files"


def check_completeness(pair: Pair) -> str:
    """The checkpoint holds the source's tensors, quantized or not, and no other: so ties are as they were."""
    replaced = {entry.name for entry in pair.originals.values()}
    kept = set(pair.source.tensors) - replaced
    quantized = {
        f"{layer}.{leaf}"
        for layer in pair.artifact.formats
        for leaf in pair.artifact.by_layer[layer]
        if leaf.startswith(("weight", "input_", "output_"))
    }
    scales: set[str] = set()
    if kv_cache.declared(pair.artifact.config):
        layers = attention_layers(pair.skeleton.module)
        scales = kv_cache.scale_names(kv_cache.stored_path(pair.skeleton, layer) for layer in layers)
    stored = set(pair.artifact.tensors)
    missing = sorted((kept | scales) - stored)
    if missing:
        where = "needed by its cache" if missing[0].endswith(kv_cache.LEAVES) else "in the source"
        raise Failed(f"{missing[0]}: {where}, but not in the checkpoint")
    extra = sorted(stored - kept - quantized - scales)
    if extra:
        raise Failed(f"{extra[0]}: in the checkpoint, but not in the source")
    ties = len(pair.skeleton.ties)
    return f"{len(kept)} tensors kept, {len(replaced)} quantized, {ties} tied and not stored"


def check_kept_tensors(pair: Pair) -> str:
    """Tensors that are not quantized are byte-identical to the source."""
    replaced = {entry.name for entry in pair.originals.values()}
    compared = 0
    for name, entry in pair.source.tensors.items():
        copy = pair.artifact.tensors.get(name)
        if name in replaced or copy is None:
            continue
        if (copy.dtype, copy.shape) != (entry.dtype, entry.shape):
            raise Failed(
                f"{name}: {copy.dtype} {list(copy.shape)}, in the source {entry.dtype} {list(entry.shape)}"
            )
        if any(a != b for a, b in zip(read_range(entry), read_range(copy), strict=True)):
            raise Failed(f"{name}: differs from the source")
        compared += entry.nbytes
    return f"{compared:,} bytes identical"


def check_shapes(pair: Pair) -> str:
    """Quantized weights have the shape of the originals and stand for them: an error below their own norm.

    Codes of another layer, or of permuted inputs, would err by about √2 of it.
    """
    worst = ("", 0.0)
    named = 0
    for layer in pair.originals:
        if pair.artifact.formats[layer] is None:
            continue
        weight = decoded(pair.artifact, layer).dequantize(torch.float32)
        original = pair.skeleton.read(f"{layer}.weight").float()
        if weight.shape != original.shape:
            raise Failed(f"{layer}: {list(weight.shape)}, in the source {list(original.shape)}")
        error = float((weight - original).norm() / original.norm().clamp(min=torch.finfo(torch.float32).tiny))
        if error >= 1 and bool(original.any()):
            raise Failed(f"{layer}: differs from the source's weight by {error:.2f} of its norm")
        named += 1
        worst = max(worst, (layer, error), key=lambda pair: pair[1])
    return f"{named} layers, the farthest by {worst[1]:.3f} of its norm ({worst[0]})"


def check_model_config(pair: Pair) -> str:
    """``config.json`` is the source's, but for the quantization and the keys that state a dtype or version."""
    ours = {k: v for k, v in pair.artifact.config.items() if k not in _VERSION_KEYS}
    theirs = {k: v for k, v in pair.source.config.items() if k not in _VERSION_KEYS}
    for key in sorted(set(ours) | set(theirs)):
        if key not in ours or key not in theirs or ours[key] != theirs[key]:
            raise Failed(f"config.json: {key} is {ours.get(key)!r}, in the source {theirs.get(key)!r}")
    return f"{len(ours)} keys equal"


def check_files(pair: Pair) -> str:
    """Tokenizer, chat template and all other files are byte-identical to the source's; none is missing or new,
    but for text that no loader reads and the report of a recovery with its logs."""
    expected = carried_files(pair.source.path)
    for path in expected:
        copy = pair.artifact.path / carried_name(path)
        if not copy.is_file():
            raise Failed(f"{path}: in the source, but not in the checkpoint")
        if file_sha256(copy) != file_sha256(pair.source.path / path):
            raise Failed(f"{path}: differs from the source's")
    extra = sorted(set(carried_files(pair.artifact.path)) - {carried_name(path) for path in expected})
    extra = [path for path in extra if path.suffix != ".md"]
    if extra:
        raise Failed(f"{extra[0]}: in the checkpoint, but not in the source")
    return f"{len(expected)} files identical"


def check_coverage(pair: Pair) -> str:
    """The share of quantized parameters is what ``compression.json`` says, and not below the recipe's floor."""
    layers = {} if pair.artifact.sidecar is None else pair.artifact.sidecar.plan.layers
    reasons = {name: assignment.reason for name, assignment in layers.items()}
    found = coverage(pair.skeleton, pair.graph, set(pair.artifact.formats), reasons)
    line = f"{found.ratio:.1%} of {found.eligible_parameters:,} eligible parameters"
    if found.uncovered:
        line += f"; {len(found.uncovered)} matrices stay as they are"
    if pair.artifact.sidecar is None:
        return line
    stated = pair.artifact.sidecar.coverage
    if stated.quantized_parameters != found.quantized_parameters or stated.uncovered != found.uncovered:
        raise Failed(f"{line}, but compression.json says {stated.ratio:.1%}")
    floor = float(pair.artifact.sidecar.settings.get("min_coverage") or 0)
    if found.ratio < floor:
        first = next(iter(found.uncovered), "")
        raise Failed(f"{line}, below the floor of {floor:.1%}; not covered: {first} and others")
    return line
