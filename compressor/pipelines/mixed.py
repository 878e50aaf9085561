"""The mixed-precision steps of a recipe: scan, then plan, in the run directory."""

from pathlib import Path

from compressor.console import note
from compressor.errors import UsageError
from compressor.pipelines.job import choose_device
from compressor.planning.make import PlanSettings, make_plan
from compressor.planning.measure import MeasureSettings
from compressor.planning.write import plan_yaml, write_plan
from compressor.recipes import PlanRecipe, Recipe, ScanRecipe
from compressor.sensitivity.scan import ScanSettings, prepare, scan
from compressor.sensitivity.schema import read_sensitivity, write_sensitivity
from compressor.sensitivity.show import heat_map


def with_plan(recipe: Recipe, output: Path, *, overwrite: bool, dry_run: bool = False) -> Recipe:
    """Scan and plan as the recipe says; returns it with ``quantize.plan`` set to ``output``/plan.yaml.

    The scan and the plan of an earlier run are used again if they were made from the same settings. A dry run checks what
    a scan checks before it starts, and returns the recipe as it is.
    """
    assert recipe.plan is not None
    if recipe.quantize.plan is not None:
        raise UsageError("quantize.plan: the recipe makes a plan itself (plan.budget): drop one of the two")
    settings = scan_settings(recipe, recipe.scan or ScanRecipe())
    file, record = output / "sensitivity.json", output / "scan.txt"
    if dry_run:
        prepare(settings, choose_device(recipe.device))
        return recipe
    if file.exists() and record.exists() and record.read_text("utf-8") == repr(settings) and not overwrite:
        note(f"{file}: already scanned; going on from there")
    else:
        if file.exists() and not overwrite:
            raise UsageError(f"{file}: made by another recipe: choose another output or pass --overwrite")
        result = scan(prepare(settings, choose_device(recipe.device)), file)
        write_sensitivity(file, result)
        heat_map(result, output / "sensitivity.svg")
        record.write_text(repr(settings), "utf-8")
    result = read_sensitivity(file)
    made = make_plan(result, plan_settings(recipe, recipe.plan), lambda: choose_device(recipe.device))
    planned = output / "plan.yaml"
    write_plan(planned, plan_yaml(made.plan, result, planned), overwrite=True)
    if made.predicted_kl is not None:
        note(f"{planned}: {made.allocation.bits:.3f} bits a weight, predicted KL {made.predicted_kl:.4g}")
    return recipe.model_copy(
        update={"quantize": recipe.quantize.model_copy(update={"plan": planned}), "scan": None, "plan": None}
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
