"""Whether a plan, perhaps edited by hand, fits a model and an engine. Every refusal names the line."""

from collections.abc import Callable
from pathlib import Path

from compressor.engines import check as check_engine
from compressor.errors import UsageError
from compressor.formats import parse_format
from compressor.graph import ModelGraph, Unit
from compressor.plans import Plan, line_of


def check_plan(file: Path, plan: Plan, graph: ModelGraph, engine: str | None = None) -> Plan:
    """``plan`` as it is, if it can be carried out.

    Raises UsageError naming file and line for: a layer that the model does not have, a quantizable layer that is
    missing, fused siblings in different formats, a group size that does not divide the inputs, a layer that
    cannot be quantized, and a format that ``engine`` cannot load.
    """
    text = file.read_text("utf-8-sig")

    def refuse(layer: str, message: str) -> UsageError:
        return UsageError(f"{file}, line {line_of(text, 'layers', layer)}: {layer}: {message}")

    known = {layer.name for layer in graph.layers}
    for name, assignment in plan.layers.items():
        if name not in known and name not in graph.kept:
            raise refuse(name, "the model has no such layer; see `compressor inspect` for their names")
        if name in graph.kept and parse_format(assignment.format).quantized:
            raise refuse(name, f"cannot be quantized by a plan ({graph.kept[name]}): write bf16")
    for unit in graph.units:
        _check_unit(unit, plan, engine, file, refuse)
    return plan


def _check_unit(
    unit: Unit, plan: Plan, engine: str | None, file: Path, refuse: Callable[[str, str], UsageError]
) -> None:
    missing = [layer.name for layer in unit.layers if layer.name not in plan.layers]
    if missing:
        raise UsageError(
            f"{file}: layers: {missing[0]} is missing: give it a format (bf16 keeps it as it is)"
        )
    first, *others = unit.layers
    fmt = parse_format(plan.layers[first.name].format)
    for layer in others:
        other = parse_format(plan.layers[layer.name].format)
        if other != fmt:
            raise refuse(
                layer.name,
                f"is {other}, but {first.name} is {fmt}, and engines fuse them into one matrix: give both the same format",
            )
    for layer in unit.layers:
        if not fmt.fits(layer.in_features):
            raise refuse(
                layer.name, f"groups of {fmt.group_size} do not divide its {layer.in_features} inputs"
            )
    for problem in check_engine(engine, unit.layers, fmt) if engine else ():
        offer = f": use {problem.nearest}" if problem.nearest else ""
        raise refuse(problem.layer, f"{engine} cannot load {fmt} ({problem.reason}){offer}")
