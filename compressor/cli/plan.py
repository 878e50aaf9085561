"""``compressor plan``: formats for every layer within a budget."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from compressor.console import note, out, warn
from compressor.errors import UsageError
from compressor.planning.budget import Budget, parse_budget
from compressor.planning.build import Allocation, allocate, build_problem, frontier, to_plan
from compressor.planning.calibrate import Calibration, fit
from compressor.planning.latency import CostTable, gpu_costs, read_costs
from compressor.planning.measure import (
    MeasureSettings,
    Replaced,
    measure_broken,
    measure_points,
    open_job,
    predicted_damage,
    scatter,
    spread_out,
)
from compressor.planning.problem import Problem, parse_rules
from compressor.planning.write import check_target, plan_yaml, write_plan
from compressor.sensitivity.schema import Sensitivity, read_sensitivity

_BUDGET, _RULES, _PROOF, _RUN = "Budget", "Rules", "Measurement", "Run"
_POINTS = 24


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
        typer.Option(help="Count how the errors of units add up.", rich_help_panel=_RULES),
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
    if not dry_run:
        for file in (output, pareto, plot):
            if file is not None:
                check_target(file, overwrite)
    if plot is not None and not measure:
        raise UsageError(f"--plot {plot}: there is nothing to plot without --measure")
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise UsageError(f"--plot {plot}: name a .svg or .png file")
    _check_engine(engine)
    scan = read_sensitivity(sensitivity)
    if measure and scan.score == "output-mse":
        raise UsageError(
            f"{sensitivity}: output errors are not in nats, so --measure cannot calibrate them: scan again with --score fisher"
        )
    wanted = parse_budget(budget, scan)
    rules = parse_rules(pin or (), forbid or (), floor or (), engine)
    table = _cost_table(costs, gpu, batch_tokens)
    problem = build_problem(scan, wanted, rules, table=table, interactions=interactions)
    made = allocate(scan, problem, wanted, seed=seed)
    calibration: Calibration | None = None
    if measure and not dry_run:
        from compressor.pipelines.quantize import choose_device

        settings = MeasureSettings(data, samples, sequence_length, seed, trust_remote_code)
        job = open_job(scan, settings, choose_device(device))
        curve = frontier(scan, problem, _POINTS, seed=seed)
        plans = spread_out(curve, measure)
        replaced: Replaced = {}
        calibration = fit(measure_points(scan, job, plans, replaced, interactions))
        if calibration.broken:
            with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=".measuring-") as work:
                replaced = measure_broken(scan, job, calibration, plans, Path(work))
            calibration = fit(
                [
                    type(point)(
                        **{
                            **asdict(point),
                            "predicted": predicted_damage(scan, p.formats, replaced, interactions),
                        }
                    )
                    for point, p in zip(calibration.points, plans, strict=True)
                ]
            )
            for point in calibration.broken:
                warn(
                    f"at {point.bits:.2f} bits the prediction is off by {100 * calibration.error(point):+.0f} %: "
                    "trust measurements there"
                )
            problem = build_problem(
                scan, wanted, rules, table=table, interactions=interactions, replaced=replaced
            )
            made = allocate(scan, problem, wanted, seed=seed)
    predicted = (
        None if scan.score == "output-mse" else calibration(made.damage) if calibration else made.damage
    )

    if not dry_run:
        document = to_plan(
            scan, made, predicted_kl=None if predicted is None else float(f"{predicted:.4g}"), budget=wanted
        )
        write_plan(output, plan_yaml(document, scan, output), overwrite=overwrite)
        if pareto is not None:
            _write_pareto(scan, problem, calibration, pareto, seed)
        if plot is not None and calibration is not None:
            scatter(calibration, plot)
    _show(scan, made, predicted, calibration, wanted, output, as_json, dry_run)


def _check_engine(engine: str | None) -> None:
    from compressor.engines import ENGINES

    if engine is not None and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: use {', '.join(ENGINES)}")


def _cost_table(costs: Path | None, gpu: str | None, tokens: int) -> CostTable | None:
    if costs is not None and gpu is not None:
        raise UsageError("--costs and --gpu exclude each other: give one of them")
    if costs is not None:
        return read_costs(costs)
    return gpu_costs(gpu, tokens) if gpu is not None else None


def _write_pareto(
    scan: Sensitivity, problem: Problem, calibration: Calibration | None, file: Path, seed: int
) -> None:
    points = [
        {
            "bits": round(p.bits, 4),
            "bytes": p.bytes,
            "cost": p.cost,
            "damage": p.damage,
            "predicted_kl": calibration(p.damage) if calibration else None,
            "formats": p.formats,
        }
        for p in frontier(scan, problem, _POINTS, seed=seed)
    ]
    unfinished = file.with_name(f".{file.name}.partial")
    unfinished.write_text(
        json.dumps({"artifact": "pareto", "version": 1, "plans": points}, indent=1) + "\n", "utf-8"
    )
    unfinished.replace(file)


def _show(
    scan: Sensitivity,
    made: Allocation,
    predicted: float | None,
    calibration: Calibration | None,
    budget: Budget,
    output: Path,
    as_json: bool,
    dry_run: bool,
) -> None:
    if as_json:
        answer: dict[str, Any] = {
            "path": None if dry_run else str(output),
            "budget": budget.text,
            "bytes": made.bytes,
            "bits": made.bits,
            "damage": made.damage,
            "predicted_kl": predicted,
            "calibration": asdict(calibration) if calibration else None,
            "formats": made.formats,
        }
        print(json.dumps(answer, indent=2))
        return
    counts: dict[str, int] = {}
    for unit in scan.units:
        counts[made.formats[unit.name]] = counts.get(made.formats[unit.name], 0) + 1
    table = Table("format", "units", title="plan")
    for name in scan.formats:
        if name in counts:
            table.add_row(name, str(counts[name]))
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
    told = "" if predicted is None else f", predicted KL {predicted:.4g} nats per token ({how})"
    where = "dry run" if dry_run else str(output)
    out.print(
        f"{where}: {made.bits:.3f} bits a weight, {made.bytes / 1e6:.1f} MB in all{told}",
        markup=False,
        highlight=False,
    )
    if not dry_run:
        note(f"next: compressor quantize {scan.model} --plan {output} -o OUTPUT")
