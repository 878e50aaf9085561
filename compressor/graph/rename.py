"""From the names that a checkpoint stores to the parameters of the model that transformers builds.

Checkpoints keep the names they were published with; transformers renames and merges while it loads
(``transformers.conversion_mapping``). The same tables are read here, without loading anything.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from compressor.errors import InputRefused
from compressor.graph.experts import Experts, StoredExperts, can_unfuse, is_stack
from compressor.sources.model import Source
from compressor.sources.tensors import TensorEntry


def to_parameters(model: PreTrainedModel, source: Source) -> dict[str, TensorEntry]:
    """The stored tensor of each parameter of ``model``; tensors that it does not know are left out.

    Stacks of experts that are stored expert by expert are replaced in ``model`` by :class:`Experts`, at the path that
    they are stored at. Raises InputRefused for tensors that transformers merges in any other way.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    known = model.state_dict()
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}

    stored: dict[str, TensorEntry] = {}
    merged: dict[str, dict[str, list[str]]] = {}  # parameter -> source pattern -> stored names
    for name, entry in source.tensors.items():
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if pattern is None:
            if target in known:
                stored[target] = entry
        elif target in known:
            merged.setdefault(target, {}).setdefault(pattern, []).append(name)

    stacks = {name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0]) for name in merged}
    for path, stack in stacks.items():
        names = _stored_experts(path, stack, merged, by_pattern, source)
        mounted = _replace(model, path, Experts(stack, names), names, stored)
        for name in (*names.gate, *names.up, *names.down):
            expert, leaf = name.split(".")[-2:]
            stored[f"{mounted}.{expert}.{leaf}.weight"] = source.tensors[f"{name}.weight"]
    return stored


def _stored_experts(
    path: str,
    stack: nn.Module,
    merged: dict[str, dict[str, list[str]]],
    converters: dict[str, WeightConverter],
    source: Source,
) -> StoredExperts:
    def listed(parameter: str, *operations: Any) -> list[tuple[str, ...]]:
        """The stored names of each part of a parameter, by expert."""
        parts = merged.pop(f"{path}.{parameter}", {})
        first = next(iter(parts), None)
        if first is None:
            return []
        converter = converters[first]
        if tuple(type(o) for o in converter.operations) != operations:
            raise InputRefused(
                f"{source.path}: {path}.{parameter} is stored in a form that compressor does not convert (first {parts[first][0]})"
            )
        ordered = [pattern for pattern in converter.source_patterns if pattern in parts]
        return [
            tuple(n.removesuffix(".weight") for n in sorted(parts[pattern], key=dot_natural_key))
            for pattern in ordered
        ]

    gated = is_stack(stack) and can_unfuse(stack) and bool(getattr(stack, "has_gate", True))
    inputs = (
        listed("gate_up_proj", MergeModulelist, Concatenate) if gated else listed("up_proj", MergeModulelist)
    )
    outputs = listed("down_proj", MergeModulelist)
    count = getattr(stack, "num_experts", None)
    complete = len(inputs) == 1 + gated and len(outputs) == 1
    if not is_stack(stack) or not can_unfuse(stack) or not complete:
        raise InputRefused(f"{source.path}: {path} is stored in a form that compressor does not convert")
    for names in (*inputs, *outputs):
        if len(names) != count:
            raise InputRefused(
                f"{source.path}: {path} has {count} experts, but {len(names)} are stored (first {names[0]})"
            )
    return StoredExperts(inputs[0] if gated else (), inputs[-1], outputs[0])


def _replace(
    model: nn.Module, path: str, experts: Experts, names: StoredExperts, stored: dict[str, TensorEntry]
) -> str:
    """Put ``experts`` in the place of the stack at ``path``, under the path that the checkpoint has for it, and
    return that."""
    model.set_submodule(path, experts)
    at = names.down[0].rpartition(".")[0].rpartition(".")[0].split(".")
    here = path.split(".")
    if len(at) != len(here):
        return path  # a checkpoint of the base model alone, whose names lack the prefix
    for depth, (old, new) in enumerate(zip(here, at, strict=True)):
        parent = model.get_submodule(".".join(at[:depth]))
        if old == new or old not in parent._modules:
            continue
        child = parent._modules[old]
        parent._modules = {new if key == old else key: value for key, value in parent._modules.items()}
        object.__setattr__(parent, old, child)  # for the forward of its parent, out of the module tree
        before, after = ".".join([*at[:depth], old, ""]), ".".join([*at[:depth], new, ""])
        for name in [n for n in stored if n.startswith(before)]:
            stored[after + name.removeprefix(before)] = stored.pop(name)
    return ".".join(at)
