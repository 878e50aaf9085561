"""The mixed-precision steps of a recipe: scan, then plan, in the run directory."""

from pathlib import Path

from compressor.console import note
from compressor.errors import UsageError
from compressor.pipelines.job import choose_device
from compressor.planning.build import Allocation, frontier
from compressor.planning.make import CURVE_POINTS, Made, PlanSettings, make_plan
from compressor.planning.measure import MeasureSettings
from compressor.planning.write import plan_yaml, write_plan
from compressor.recipes import PlanRecipe, Recipe, ScanRecipe
from compressor.reports.schema import Planning, PlanPoint, Scan, UnitDamage
from compressor.sensitivity.scan import ScanSettings, prepare, scan
from compressor.sensitivity.schema import Sensitivity, read_sensitivity, write_sensitivity
from compressor.sensitivity.show import heat_map


def check_mixed(recipe: Recipe) -> None:
    """Raise UsageError for sections that contradict each other."""
    if recipe.scan is not None and recipe.plan is None:
        raise UsageError("scan: serves nothing without a plan: give plan.budget, or drop scan")
    if recipe.plan is not None and recipe.quantize.plan is not None:
        raise UsageError("quantize.plan: the recipe makes a plan itself (plan.budget): drop one of the two")


def scan_and_write(recipe: Recipe, output: Path, *, dry_run: bool = False) -> None:
    """Scan as the recipe says: ``sensitivity.json`` and its heat map. A dry run checks what a scan checks first."""
    prepared = prepare(scan_settings(recipe, recipe.scan or ScanRecipe()), choose_device(recipe.device))
    if dry_run:
        return
    file = output / "sensitivity.json"
    result = scan(prepared, file)
    heat_map(result, output / "sensitivity.svg")
    write_sensitivity(file, result)


def make_and_write_plan(recipe: Recipe, output: Path) -> Planning:
    """``plan.yaml`` from ``sensitivity.json``, and the report's section about it."""
    assert recipe.plan is not None
    result = read_sensitivity(output / "sensitivity.json")
    made = make_plan(result, plan_settings(recipe, recipe.plan), lambda: choose_device(recipe.device))
    planned = output / "plan.yaml"
    section = planning_section(result, made, seed=recipe.seed)
    write_plan(planned, plan_yaml(made.plan, result, planned), overwrite=True)
    if made.predicted_kl is not None:
        note(f"{planned}: {made.allocation.bits:.3f} bits a weight, predicted KL {made.predicted_kl:.4g}")
    return section


def planning_section(scanned: Sensitivity, made: Made, *, seed: int) -> Planning:
    """The plan among others: the frontier, and what was measured."""
    calibration = made.calibration

    def predicted(damage: float) -> float | None:
        if scanned.score == "output-mse":
            return None
        return calibration(damage) if calibration else damage

    def point(allocation: Allocation) -> PlanPoint:
        return PlanPoint(bits=allocation.bits, bytes=allocation.bytes, predicted=predicted(allocation.damage))

    measured = calibration.points if calibration else ()
    return Planning(
        budget=made.budget.text,
        chosen=point(made.allocation),
        calibrated=calibration is not None,
        frontier=[point(one) for one in frontier(scanned, made.problem, CURVE_POINTS, seed=seed)],
        measured=[
            PlanPoint(
                bits=p.bits,
                bytes=p.bytes,
                predicted=predicted(p.predicted),
                measured=p.measured,
                stderr=p.stderr,
            )
            for p in measured
        ],
    )


def scan_section(scanned: Sensitivity) -> Scan:
    """The scan's damages as the report's section."""
    return Scan(
        score=scanned.score,
        unit="relative output error" if scanned.score == "output-mse" else "ΔKL, nats per token",
        formats=list(scanned.formats),
        tokens=scanned.tokens,
        units=[
            UnitDamage(
                unit=unit.name,
                kind=unit.kind,
                block=unit.block,
                damage={name: score.damage for name, score in unit.formats.items()},
            )
            for unit in scanned.units
        ],
    )


def scan_settings(recipe: Recipe, wanted: ScanRecipe) -> ScanSettings:
    return ScanSettings(
        model=recipe.model,
        formats=wanted.formats,
        score=wanted.score,
        engine=recipe.quantize.engine,
        rounding=wanted.rounding,
        draws=wanted.draws,
        data=wanted.data.data,
        column=wanted.data.column,
        split=wanted.data.split,
        samples=wanted.data.samples,
        sequence_length=wanted.data.sequence_length,
        seed=recipe.seed,
        revision=recipe.revision,
        trust_remote_code=recipe.trust_remote_code,
        allow_pickle=recipe.allow_pickle,
    )


def plan_settings(recipe: Recipe, wanted: PlanRecipe) -> PlanSettings:
    return PlanSettings(
        budget=wanted.budget,
        pins=wanted.pin,
        forbids=wanted.forbid,
        floors=wanted.floor,
        engine=recipe.quantize.engine,
        interactions=wanted.interactions,
        costs=wanted.costs,
        gpu=wanted.gpu,
        measure=wanted.measure,
        measurement=MeasureSettings(seed=recipe.seed, trust_remote_code=recipe.trust_remote_code),
        seed=recipe.seed,
    )
