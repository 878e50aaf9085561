"""The formats considered for each unit, and the weight errors they make."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from compressor.calibration.gram import Gram
from compressor.calibration.stream import Stream, call_block
from compressor.engines import check as check_engine
from compressor.errors import UsageError
from compressor.formats import DENSE, Format, QuantizedWeight, fitting
from compressor.graph import ModelGraph, Unit
from compressor.graph.experts import all_tokens_seen
from compressor.rounding.unit import Method, round_unit
from compressor.sensitivity.probes import Candidate


def formats_of_units(
    graph: ModelGraph, formats: Iterable[Format], engine: str | None
) -> tuple[dict[str, tuple[Format, ...]], list[str]]:
    """The quantized formats that each unit (by name) may have, and warnings about what was left out.

    A group size that does not divide a unit's inputs is replaced by the next smaller one; formats that
    ``engine`` cannot load for the unit's shapes are left out. Raises UsageError when nothing is left.
    """
    wanted = [fmt for fmt in dict.fromkeys(formats) if fmt.quantized]
    found: dict[str, tuple[Format, ...]] = {}
    dropped: dict[str, list[str]] = {}
    for unit in graph.units:
        usable: list[Format] = []
        for fmt in wanted:
            fits = fitting(fmt, *(layer.in_features for layer in unit.layers))
            if fits is None:
                dropped.setdefault(f"{fmt}: no group size divides the inputs", []).append(unit.name)
                continue
            problems = check_engine(engine, unit.layers, fits) if engine else []
            if problems:
                dropped.setdefault(f"{engine} cannot load {fits}: {problems[0].reason}", []).append(unit.name)
            elif fits not in usable:
                usable.append(fits)
        found[unit.name] = tuple(usable)
    warnings = [
        f"{reason}: left out for {'every unit' if len(names) == len(graph.units) else f'{len(names)} units, first {names[0]}'}"
        for reason, names in dropped.items()
    ]
    if not any(found.values()):
        names = ", ".join(fmt.name for fmt in wanted) or DENSE.name
        raise UsageError(
            f"--formats {names}: nothing to scan ({'; '.join(dropped) or 'no quantized format'})"
        )
    return found, warnings


def candidates_of(
    unit: Unit,
    modules: dict[str, nn.Linear],
    formats: Sequence[Format],
    hessians: Mapping[str, Tensor],
    *,
    method: Method,
    scale_dtype: torch.dtype,
) -> list[Candidate]:
    """Round the layers of ``unit`` to each format, exactly as ``quantize`` does on an unquantized prefix.

    ``hessians`` are :func:`input_moments`; without them layers are rounded to nearest.
    The errors are left in main memory, so that a device never holds more than one format of a layer.
    """
    weights = {layer.name: modules[layer.name].weight for layer in unit.layers}
    made = []
    for fmt in formats:
        rounded = rounded_layers(unit, weights, fmt, hessians, method=method, scale_dtype=scale_dtype)
        errors = {
            name: (weight.dequantize(torch.float32) - weights[name].float()).to(weights[name].dtype).cpu()
            for name, weight in rounded.items()
        }
        made.append(Candidate(unit, fmt, errors))
    return made


def rounded_layers(
    unit: Unit,
    weights: Mapping[str, Tensor],
    fmt: Format,
    hessians: Mapping[str, Tensor],
    *,
    method: Method,
    scale_dtype: torch.dtype,
) -> dict[str, QuantizedWeight]:
    """The layers of ``unit`` in ``fmt``, each part with its own of ``hessians`` (see :func:`input_moments`)."""
    found: dict[str, QuantizedWeight] = {}
    for part in unit.by_input:
        rounded = round_unit(
            [weights[layer.name] for layer in part.layers],
            fmt,
            hessians.get(part.name),
            method=method,
            scales="mse",
            damping=0.01,
            scale_dtype=scale_dtype,
        )
        found |= {layer.name: result.weight for layer, result in zip(part.layers, rounded, strict=True)}
    return found


def input_moments(
    stream: Stream,
    block: nn.Module,
    index: int,
    hidden: Tensor,
    units: Sequence[Unit],
    modules: dict[str, nn.Linear],
) -> dict[str, Tensor]:
    """Mean of x xᵀ over the inputs of each part of each unit (by name), [in, in] fp32; ``hidden`` [n, T, H] enters the
    block."""
    grams: dict[str, Gram] = {}
    valid: Tensor | None = None
    handles = []
    for unit in (part for whole in units for part in whole.by_input):

        def note(module: nn.Module, args: tuple[Tensor, ...], name: str = unit.name) -> None:
            x = args[0]
            gram = grams.setdefault(name, Gram(x.shape[-1], x.device))
            flat = x.reshape(-1, x.shape[-1])
            gram.add(flat if valid is None else flat[valid])

        handles.append(modules[unit.layers[0].name].register_forward_pre_hook(note))
    try:
        with torch.inference_mode(), all_tokens_seen(block):
            for number, batch in enumerate(stream.batches):
                mask = stream.valid[batch]
                valid = None if bool(mask.all()) else mask.reshape(-1).to(stream.device)
                call_block(stream, block, index, number, hidden[batch].to(stream.device))
    finally:
        for handle in handles:
            handle.remove()
    return {name: gram.mean() for name, gram in grams.items()}


def weight_error(candidate: Candidate, modules: dict[str, nn.Linear]) -> float:
    """|ΔW|² / |W|² over the layers of a unit."""
    lost = sum(float(delta.double().square().sum()) for delta in candidate.errors.values())
    total = sum(float(modules[name].weight.double().square().sum()) for name in candidate.errors)
    return lost / total if total > 0 else 0.0
