"""``compressor plan``: formats for every layer within a budget."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from compressor.console import note, out
from compressor.errors import UsageError

if TYPE_CHECKING:  # torch and scipy load when the command runs, not for its help
    import torch

    from compressor.planning.make import Made
    from compressor.sensitivity.schema import Sensitivity

_BUDGET, _RULES, _PROOF, _RUN = "Budget", "Rules", "Measurement", "Run"


def plan(
    sensitivity: Annotated[Path, typer.Argument(help="What scan-sensitivity wrote.", show_default=False)],
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            "-b",
            help="4.5bits a weight over all units; 120MB or 60% for the whole checkpoint; latency:12ms in the units' products.",
            show_default=False,
            rich_help_panel=_BUDGET,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the plan to.")] = Path(
        "plan.yaml"
    ),
    costs: Annotated[
        Path | None,
        typer.Option(
            help="Times of scripts/measure_costs.py, for a latency budget.",
            show_default=False,
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Roofline of a GPU such as h100-sxm, for a latency budget.",
            show_default=False,
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    batch_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens computed at once, with --gpu: 1 is decoding.", rich_help_panel=_BUDGET
        ),
    ] = 1,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            help="PATTERN=FORMAT that must be used. Names, globs or re:REGEX. Repeatable.",
            show_default=False,
            rich_help_panel=_RULES,
        ),
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(
            help="PATTERN=FORMAT that must not be used. Repeatable.",
            show_default=False,
            rich_help_panel=_RULES,
        ),
    ] = None,
    floor: Annotated[
        list[str] | None,
        typer.Option(
            help="PATTERN=BITS: no fewer bits. Repeatable.", show_default=False, rich_help_panel=_RULES
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Only what vllm-cuda, vllm-cpu or transformers can load.",
            show_default=False,
            rich_help_panel=_RULES,
        ),
    ] = None,
    interactions: Annotated[
        bool,
        typer.Option(
            help="Count how the errors of units add up, or take each unit's damage alone.",
            rich_help_panel=_RULES,
        ),
    ] = True,
    pareto: Annotated[
        Path | None,
        typer.Option(
            help="Write the Pareto curve to this .json file.", show_default=False, rich_help_panel=_BUDGET
        ),
    ] = None,
    measure: Annotated[
        int,
        typer.Option(
            min=0,
            help="Measure this many whole plans along the curve and calibrate with them.",
            rich_help_panel=_PROOF,
        ),
    ] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw predicted against measured KL into this .svg or .png file.",
            show_default=False,
            rich_help_panel=_PROOF,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Text to measure on (default: the scan's).",
            show_default=False,
            rich_help_panel=_PROOF,
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Sequences to measure on.", rich_help_panel=_PROOF)
    ] = 16,
    sequence_length: Annotated[
        int, typer.Option(min=8, help="Tokens in a sequence.", rich_help_panel=_PROOF)
    ] = 256,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that the model brings.", rich_help_panel=_PROOF),
    ] = False,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:N, to measure on.", rich_help_panel=_PROOF)
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed.", rich_help_panel=_RUN)] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at --output.", rich_help_panel=_RUN)
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the plan; measure and write nothing.", rich_help_panel=_RUN),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Choose a format for every unit so that the damage is least within a budget.

    Example: [bold]compressor plan sensitivity.json --budget 4.5bits --pin '*.down_proj=w8' --measure 4[/bold]
    """
    from compressor.engines import check_name
    from compressor.planning.make import PlanSettings, make_plan
    from compressor.planning.measure import MeasureSettings, scatter
    from compressor.planning.write import check_target, plan_yaml, write_plan
    from compressor.sensitivity.schema import read_sensitivity

    if not dry_run:
        for file in (output, pareto, plot):
            if file is not None:
                check_target(file, overwrite)
    if plot is not None and not measure:
        raise UsageError(f"--plot {plot}: there is nothing to plot without --measure")
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise UsageError(f"--plot {plot}: name a .svg or .png file")
    check_name(engine)
    scan = read_sensitivity(sensitivity)
    settings = PlanSettings(
        budget=budget,
        pins=pin or (),
        forbids=forbid or (),
        floors=floor or (),
        engine=engine,
        interactions=interactions,
        costs=costs,
        gpu=gpu,
        batch_tokens=batch_tokens,
        measure=0 if dry_run else measure,
        measurement=MeasureSettings(data, samples, sequence_length, seed, trust_remote_code),
        seed=seed,
    )
    made = make_plan(scan, settings, partial(_device, device))
    if not dry_run:
        write_plan(output, plan_yaml(made.plan, scan, output), overwrite=overwrite)
        if pareto is not None:
            _write_pareto(scan, made, pareto, seed)
        if plot is not None and made.calibration is not None:
            scatter(made.calibration, plot)
    _show(scan, made, output, as_json, dry_run)


def _device(name: str) -> "torch.device":
    from compressor.pipelines.job import choose_device

    return choose_device(name)


def _write_pareto(scan: "Sensitivity", made: "Made", file: Path, seed: int) -> None:
    from compressor.planning.build import frontier
    from compressor.planning.make import CURVE_POINTS
    from compressor.reports.write import write_atomically

    points = [
        {
            "bits": round(p.bits, 4),
            "bytes": p.bytes,
            "cost": p.cost,
            "damage": p.damage,
            "predicted_kl": made.calibration(p.damage) if made.calibration else None,
            "formats": p.formats,
        }
        for p in frontier(scan, made.problem, CURVE_POINTS, seed=seed)
    ]
    write_atomically(file, json.dumps({"artifact": "pareto", "version": 1, "plans": points}, indent=1) + "\n")


def _show(scan: "Sensitivity", made: "Made", output: Path, as_json: bool, dry_run: bool) -> None:
    allocation, calibration = made.allocation, made.calibration
    if as_json:
        from compressor.cli.documents import Planned, print_document

        print_document(
            Planned(
                path=None if dry_run else str(output),
                budget=made.budget.text,
                bytes=allocation.bytes,
                bits=allocation.bits,
                damage=allocation.damage,
                predicted_kl=made.predicted_kl,
                calibration=calibration,
                formats=allocation.formats,
            )
        )
        return
    chosen = [allocation.formats[unit.name] for unit in scan.units]
    table = Table("format", "units", title="plan")
    for name in scan.formats:
        if name in chosen:
            table.add_row(name, str(chosen.count(name)))
    out.print(table)
    if calibration is not None:
        measured = Table("bits", "predicted KL", "measured KL", "off by", title="measured plans")
        for point in calibration.points:
            measured.add_row(
                f"{point.bits:.2f}",
                f"{calibration(point.predicted):.4f}",
                f"{point.measured:.4f} ± {1.96 * point.stderr:.4f}",
                f"{100 * calibration.error(point):+.0f} %",
            )
        out.print(measured)
    how = "calibrated" if calibration else "second-order, not calibrated"
    told = (
        "" if made.predicted_kl is None else f", predicted KL {made.predicted_kl:.4g} nats per token ({how})"
    )
    where = "dry run" if dry_run else str(output)
    out.print(
        f"{where}: {allocation.bits:.3f} bits a weight, {allocation.bytes / 1e6:.1f} MB in all{told}",
        markup=False,
        highlight=False,
    )
    if not dry_run:
        note(f"next: compressor quantize {scan.model} --plan {output} -o OUTPUT")
