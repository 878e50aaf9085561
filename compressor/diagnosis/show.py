"""A diagnosis for people: tables on the terminal, a plot, and the edited plan as a file to read."""

from pathlib import Path

import yaml
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from compressor.diagnosis.schema import Diagnosis, Fix, Place
from compressor.planning.write import layer_line, plain
from compressor.plans import Plan
from compressor.reports.schema import Estimate
from compressor.sensitivity.figure import drawn
from compressor.sensitivity.show import shared_path

_FIX = {"adaround": "adaround", "finer": "finer groups", "w8": "8 bits", "bf16": "unquantized"}


def tables(found: Diagnosis, *, every: bool, wide: bool) -> RenderableType:
    """The verdict, the layers (``every`` one, or the worst and those around a jump) and the fixes."""
    parts: list[RenderableType] = [escape(headline(found)), layer_table(found, every, wide)]
    if found.fixes:
        parts.append(fix_table(found))
    if found.edited:
        edited = found.edited
        parts.append(
            escape(
                f"with {len(edited.units)} fixed unit{'s' if len(edited.units) > 1 else ''}: KL {interval(edited.kl_before)} → "
                f"{interval(edited.kl_after)} on {found.held_out} held-out sequences, {edited.extra_bytes:+,} bytes"
            )
        )
    elif found.fixes:
        parts.append("no fix that was tried gains more than its uncertainty")
    return Group(*parts)


def headline(found: Diagnosis) -> str:
    kl = f"KL {interval(found.kl)} nats per token; " if found.kl else ""
    worst = next((p for p in found.places if found.units and p.name == found.units[0]), None)
    share = ""
    total = sum(p.predicted_kl or 0.0 for p in found.places)
    if worst is not None and worst.predicted_kl is not None and total > 0:
        share = f" ({100 * worst.predicted_kl / total:.0f} % of the predicted KL)"
    jump = f"the error jumps at {found.first_jump}" if found.first_jump else "no layer stands out"
    return f"{kl}first suspect: {worst.name if worst else 'none'}{share}; {jump}"


def layer_table(found: Diagnosis, every: bool, wide: bool, rows: int = 16) -> Table:
    """``wide`` terminals have room for formats, cosines and largest errors too."""
    shared = shared_path([p.name for p in found.places if p.kind not in ("norm", "head")])
    rank = {name: number for number, name in enumerate(found.units, 1)}
    shown = [p for p in found.places if every or p.jump or rank.get(p.name, rows + 1) <= rows]
    table = Table(
        title=f"{len(shown)} of {len(found.places)} layers, in the order of computation: signal over error in dB",
        caption="weights, inputs, before: what rounded weights, quantized inputs and errors made before cause alone",
    )
    table.add_column(f"layer\n({shared}.…)" if shared else "layer", overflow="fold")
    for name in ("all", "weights", "inputs", "before", "KL alone", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("format", "cosine", "max error") if wide else ():
        table.add_column(name, justify="right", no_wrap=True)
    for place in shown:
        cells = [*_row(place, shared, rank), *(_more(place) if wide else ())]
        table.add_row(*cells, style="red" if place.jump else None)
    return table


def _row(place: Place, shared: str, rank: dict[str, int]) -> list[str]:
    ratios = (place.snr_db, place.weights_snr_db, place.activations_snr_db, place.inherited_snr_db)
    return [
        escape(place.name.removeprefix(f"{shared}.") + (" ← jump" if place.jump else "")),
        *("–" if ratio is None else f"{ratio:.1f}" for ratio in ratios),
        "–" if place.predicted_kl is None else f"{place.predicted_kl:.2g}",
        str(rank.get(place.name, "–")),
    ]


def _more(place: Place) -> list[str]:
    cosine = "–" if place.cosine is None else f"{place.cosine:.5f}"
    return [place.format, cosine, f"{place.max_error:.3g}"]


def fix_table(found: Diagnosis, rows: int = 12) -> Table:
    """Those that were tried, and the best others."""
    shown = [fix for number, fix in enumerate(found.fixes) if number < rows or fix.measured_gain]
    shared = shared_path(found.units)
    table = Table(title=f"{len(shown)} of {len(found.fixes)} fixes, by KL gained per byte (nats per token)")
    table.add_column(f"unit\n({shared}.…)" if shared else "unit", overflow="fold")
    table.add_column("fix", no_wrap=True)
    for name in ("bytes", "predicted", "measured"):
        table.add_column(name, justify="right")
    for fix in shown:
        table.add_row(
            escape(fix.unit.removeprefix(f"{shared}.")),
            f"{_FIX[fix.fix]}, {fix.format}",
            f"{fix.extra_bytes:+,}",
            f"{fix.predicted_gain:.3g}",
            escape(_measured(fix).replace(" [", "\n[")),
        )
    return table


def _measured(fix: Fix) -> str:
    if fix.measured_gain is None:
        return "not tried"
    return f"{interval(fix.measured_gain)}{'' if fix.kept else ' (dropped)'}"


def interval(value: Estimate) -> str:
    if value.low is None or value.high is None:
        return f"{value.value:.4g}"
    return f"{value.value:.4g} [{value.low:.3g}, {value.high:.3g}]"


def print_diagnosis(found: Diagnosis, console: Console, every: bool) -> None:
    console.print(tables(found, every=every, wide=console.width >= 110), highlight=False)


def plot(found: Diagnosis, file: Path) -> None:
    """Signal over error of every layer in the order of computation, and what it is made of; ``file`` is an .svg."""
    places = [p for p in found.places if p.snr_db is not None or p.weights_snr_db is not None]
    lines = {
        "whole error": [p.snr_db for p in places],
        "rounded weights alone": [p.weights_snr_db for p in places],
        "quantized inputs alone": [p.activations_snr_db for p in places],
        "made before": [p.inherited_snr_db for p in places],
    }
    with drawn(file, min(20.0, 3 + 0.12 * len(places)), 4.2) as figure:
        axis = figure.subplots()
        for (label, values), style in zip(lines.items(), ("-", "o", "s", ":"), strict=True):
            if any(value is not None for value in values):
                ratios = [float("nan") if value is None else value for value in values]
                axis.plot(range(len(places)), ratios, style, label=label, markersize=3.5, linewidth=1.2)
        for number, place in enumerate(places):
            if place.jump:
                axis.axvline(number, color="tab:red", linewidth=0.8)
                axis.annotate(
                    place.name, (number, axis.get_ylim()[0]), rotation=90, fontsize=7, va="bottom", ha="right"
                )
        starts = [n for n, p in enumerate(places) if n == 0 or p.block != places[n - 1].block]
        axis.set_xticks(starts, [str(places[n].block) for n in starts])
        axis.set_xlabel("block")
        axis.set_ylabel("signal over error (dB)")
        axis.legend()


def edited_plan_yaml(plan: Plan, found: Diagnosis, file: str) -> str:
    """The document; what was changed carries its reason."""
    assert found.edited is not None
    head = (
        f"# Made by `compressor diagnose`: {len(found.edited.units)} of {len(found.units)} units changed, the others as in "
        f"{plain(found.compressed)}.\n"
        f"# Carry it out with `compressor quantize {plain(found.original)} --plan {file} --method {found.edited.method}`.\n"
    )
    facts = yaml.safe_dump(
        plan.model_dump(mode="json", exclude={"layers"}, exclude_none=True),
        sort_keys=False,
        allow_unicode=True,
        width=1000,
    )
    return head + facts + "layers:\n" + "".join(f"{layer_line(name, plan)}\n" for name in plan.layers)
