"""``compressor inspect``: what is in a model, without loading its weights."""

import re
from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table

from compressor.console import out

_FORMATS = ("w4g128", "w4g64", "w4g32", "w8", "w8a8", "fp8")


def inspect(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file or 'builtin'.")],
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.", show_default=False)] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show a model's units, shapes and sizes, and which formats each engine can load."""
    from compressor.checkpoint.coverage import coverage
    from compressor.engines import ENGINES, check
    from compressor.errors import InputRefused
    from compressor.formats import parse_format
    from compressor.graph import build_skeleton, discover
    from compressor.graph.assign import refuse_unsupported
    from compressor.sources.model import open_model

    source = open_model(model, revision=revision, trust_remote_code=trust_remote_code, allow_quantized=True)
    if source.quantized:
        _print_quantized(source.config, len(source.tensors), as_json)
        return
    skeleton = build_skeleton(source)
    graph = discover(skeleton)
    shapes: dict[tuple[Any, ...], list[str]] = {}
    for unit in graph.units:
        key = (unit.kind, tuple((layer.out_features, layer.in_features) for layer in unit.layers))
        shapes.setdefault(key, []).append(unit.name)
    loads = {
        engine: [
            name
            for name in _FORMATS
            if all(parse_format(name).fits(layer.in_features) for layer in graph.layers)
            and not check(engine, graph.layers, parse_format(name))
        ]
        for engine in ENGINES
    }
    covered = coverage(skeleton, graph, {layer.name for layer in graph.layers}, graph.kept)
    parameters = sum(entry.numel for entry in source.tensors.values())
    size = sum(entry.nbytes for entry in source.tensors.values())
    if as_json:
        from compressor.cli.documents import Inspected, InspectedCoverage, InspectedUnit, print_document

        print_document(
            Inspected(
                architecture=type(skeleton.module).__name__,
                parameters=parameters,
                bytes=size,
                dtype=str(skeleton.dtype).removeprefix("torch."),
                blocks=list(graph.blocks),
                units=[
                    InspectedUnit(
                        name=u.name,
                        kind=u.kind,
                        layers={x.name: (x.out_features, x.in_features) for x in u.layers},
                    )
                    for u in graph.units
                ],
                kept=graph.kept,
                unsupported=sorted(graph.unsupported),
                coverage=InspectedCoverage(
                    ratio=covered.ratio,
                    eligible_parameters=covered.eligible_parameters,
                    skipped=covered.uncovered,
                ),
                ties=skeleton.ties,
                unused_tensors=list(skeleton.unused),
                loadable_everywhere_in=loads,
            )
        )
        return
    out.print(
        f"{type(skeleton.module).__name__}: {parameters / 1e6:.1f} M parameters, {size / 1e6:.1f} MB, "
        f"{str(skeleton.dtype).removeprefix('torch.')}, {len(graph.blocks)} blocks, {len(graph.units)} units",
        markup=False,
        highlight=False,
    )
    table = Table("unit", "count", "layers [out × in]", "parameters each")
    for (kind, _), names in shapes.items():
        unit = next(u for u in graph.units if u.name == names[0])
        shown = Counter(f"{x.name.rpartition('.')[2]} {x.out_features}×{x.in_features}" for x in unit.layers)
        layers = ", ".join(f"{count} · {text}" if count > 1 else text for text, count in shown.items())
        table.add_row(kind, str(len(names)), layers, f"{unit.numel:,}")
    out.print(table)
    kept = {}
    for name, reason in graph.kept.items():
        tied = f", shares {skeleton.ties[f'{name}.weight']}" if f"{name}.weight" in skeleton.ties else ""
        kept[name] = f"{reason}{tied}"
    for line in _alike(kept):
        out.print(f"kept: {line}", markup=False, highlight=False)
    for line in _alike(dict.fromkeys(skeleton.unused, "unknown to the model class, carried over")):
        out.print(f"kept: {line}", markup=False, highlight=False)
    out.print(
        f"quantizable: {covered.ratio:.1%} of {covered.eligible_parameters:,} parameters in matrices other than embeddings",
        markup=False,
        highlight=False,
    )
    try:
        refuse_unsupported(skeleton, graph)
    except InputRefused as error:
        out.print(f"refused by quantize: {error}", markup=False, highlight=False)
    for engine, names in loads.items():
        out.print(
            f"{engine} loads every layer in: {', '.join(names) or 'none'}", markup=False, highlight=False
        )


def _alike(reasons: dict[str, str]) -> list[str]:
    """One line for all modules whose names differ in numbers only and that have one reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), reason), []).append(name)
    return [
        f"{pattern if len(names) > 1 else names[0]} ({reason}{f', {len(names)} of them' if len(names) > 1 else ''})"
        for (pattern, reason), names in groups.items()
    ]


def _print_quantized(config: dict[str, Any], tensors: int, as_json: bool) -> None:
    quantization = config.get("quantization_config", {})
    if as_json:
        from compressor.cli.documents import InspectedQuantized, print_document

        print_document(InspectedQuantized(tensors=tensors, quantization_config=quantization))
        return
    out.print(
        f"already quantized: {quantization.get('quant_method', 'unknown')}, {tensors} tensors",
        highlight=False,
    )
    for name, group in quantization.get("config_groups", {}).items():
        weights = group.get("weights") or {}
        out.print(
            f"{name}: {weights.get('num_bits')} bits {weights.get('strategy')}, {len(group.get('targets', []))} targets, {group.get('format')}",
            markup=False,
            highlight=False,
        )
