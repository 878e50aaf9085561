"""From one scheme and the user's patterns to a plan that names every layer."""

import fnmatch
import re
from collections.abc import Collection, Iterable

from torch import nn

from compressor.errors import InputRefused, UsageError
from compressor.formats import DENSE, Format, fitting, stored_bytes
from compressor.graph.skeleton import Skeleton
from compressor.graph.units import Linear, ModelGraph, Unit
from compressor.plans import Assignment, Plan
from compressor.sources.tensors import TensorEntry

IGNORED = "ignored by the user"
_UNSUPPORTED_SHARE = 0.01


def uniform_plan(
    skeleton: Skeleton,
    graph: ModelGraph,
    scheme: Format,
    *,
    ignore: Iterable[str] = (),
    include: Iterable[str] = (),
    strict: bool = False,
) -> Plan:
    """Give every layer inside the blocks the format ``scheme``; everything else stays as it is.

    A unit whose inputs the group size does not divide falls back to the next smaller group size
    (128 → 64 → 32), which the plan records; with ``strict`` that is refused, naming the layers.
    ``ignore`` keeps more layers, ``include`` adds layers outside the blocks (the output head, for
    example). Patterns are full names, globs, or regular expressions after ``re:``; one that matches
    nothing raises UsageError.
    """
    kept = dict(graph.kept)
    ignored = _matches("--ignore", ignore, [layer.name for layer in graph.layers] + list(kept))
    included = _matches("--include", include, [layer.name for layer in graph.layers] + list(kept))
    units = list(graph.units)
    for name in included:
        if name in kept:
            units.append(_outside_unit(skeleton, graph, name))
            del kept[name]

    misfits = [layer for unit in units for layer in unit.layers if not scheme.fits(layer.in_features)]
    misfits = [layer for layer in misfits if layer.name not in ignored]
    if strict and misfits:
        listed = ", ".join(f"{layer.name} ({layer.in_features} inputs)" for layer in misfits)
        raise InputRefused(
            f"{scheme}: the group size does not divide the inputs of {len(misfits)} layers: {listed}: "
            "choose a smaller group, --ignore them, or drop --strict"
        )

    layers: dict[str, Assignment] = {}
    reason: str | None
    for unit in units:
        group_ignored = [layer.name for layer in unit.layers if layer.name in ignored]
        if group_ignored and len(group_ignored) < len(unit.layers):
            others = ", ".join(layer.name for layer in unit.layers if layer.name not in ignored)
            raise UsageError(
                f"--ignore keeps {group_ignored[0]} but not {others}: engines fuse them into one matrix, so ignore all or none"
            )
        chosen = fitting(scheme, *(layer.in_features for layer in unit.layers))
        for layer in unit.layers:
            if layer.name in ignored:
                fmt, reason = DENSE, IGNORED
            elif chosen is None:
                misfit = next(x.in_features for x in unit.layers if fitting(scheme, x.in_features) is None)
                fmt, reason = DENSE, f"no group size divides {misfit} inputs"
            else:
                fmt = chosen
                reason = (
                    None if chosen == scheme else f"{layer.in_features} inputs: {scheme} does not divide them"
                )
                if reason and scheme.fits(layer.in_features):
                    reason = f"{scheme} does not divide the inputs of other experts of its layer"
            size = layer_bytes(skeleton, layer, fmt)
            layers[layer.name] = Assignment(format=fmt.name, bytes=size, reason=reason)
    for name, why in kept.items():
        weight = skeleton.stored.get(f"{name}.weight")
        if name in ignored:
            why = IGNORED
        layers[name] = Assignment(format=DENSE.name, bytes=weight.nbytes if weight else 0, reason=why)
    refuse_unsupported(skeleton, graph, accepted={name for name in kept if name in ignored})
    return Plan(model=skeleton.source.ref, layers=layers)


def layer_bytes(skeleton: Skeleton, layer: Linear, fmt: Format) -> int:
    """Bytes that a layer takes in the checkpoint."""
    dtype = skeleton.dtype
    return stored_bytes(fmt, layer.out_features, layer.in_features, dtype.itemsize, layer.scale_bytes(dtype))


def refuse_unsupported(skeleton: Skeleton, graph: ModelGraph, accepted: Collection[str] = ()) -> None:
    """Raise InputRefused when more than 1 % of a model's matrices is of kinds that compressor does not quantize.

    ``accepted`` are those that the user keeps by name.
    """
    entries = {name: _entry(skeleton, name) for name in graph.unsupported if name not in accepted}
    sizes = {name: entry.numel for name, entry in entries.items() if entry is not None}
    share = sum(sizes.values()) / (sum(sizes.values()) + sum(unit.numel for unit in graph.units))
    if share > _UNSUPPORTED_SHARE:
        first = min(sizes)
        parent, _, leaf = first.rpartition(".")
        pattern = f"*.{leaf}" if f"{first}.weight" in skeleton.stored else f"*.{parent.rpartition('.')[2]}.*"
        raise InputRefused(
            f"{skeleton.source.path}: {share:.0%} of what is to be quantized is in {len(sizes)} matrices that cannot be, first "
            f"{first} ({graph.kept[first]}): quantize only the rest with --ignore '{pattern}'"
        )


def _entry(skeleton: Skeleton, name: str) -> TensorEntry | None:
    return skeleton.stored.get(f"{name}.weight") or skeleton.stored.get(name)


def _outside_unit(skeleton: Skeleton, graph: ModelGraph, name: str) -> Unit:
    module = skeleton.module.get_submodule(name)
    shared = skeleton.ties.get(f"{name}.weight")
    sharers = [alias for alias, target in skeleton.ties.items() if target == f"{name}.weight"]
    if shared or sharers:
        other = (shared or sharers[0]).removesuffix(".weight")
        raise InputRefused(
            f"--include {name}: it shares its weight with {other} (tied embeddings), and engines load a quantized tied "
            "embedding unreliably: leave it out"
        )
    if not isinstance(module, nn.Linear):
        raise InputRefused(
            f"--include {name}: it is a {type(module).__name__}, and only linear layers can be quantized"
        )
    layer = Linear(name, module.out_features, module.in_features, module.bias is not None)
    return Unit(name, "head" if name == graph.head else "outside", len(graph.blocks), (layer,))


def _matches(flag: str, patterns: Iterable[str], names: list[str]) -> list[str]:
    matched: list[str] = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expression = re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise UsageError(f"{flag} {pattern}: not a regular expression ({error})") from None
            found = [name for name in names if expression.search(name)]
        else:
            found = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise UsageError(f"{flag} {pattern}: matches no layer; see `compressor inspect` for their names")
        matched += found
    return matched
