"""The whole pipeline of a recipe: quantize and verify, evaluate against the original, report.

The run directory holds ``checkpoint/``, ``report.json`` and ``report.md``, and ``run.json`` with the
fingerprint that the checkpoint was made from: a second run of the same recipe takes up where the first
one stopped, a run of a changed recipe is refused without ``--overwrite``.
"""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from compressor.checkpoint.verify import Check as CheckResult
from compressor.console import note, warn
from compressor.distillation.run import prepare as prepare_distillation
from compressor.errors import UsageError
from compressor.evaluation.facts import model_facts
from compressor.evaluation.prepare import Settings
from compressor.evaluation.prepare import prepare as prepare_evaluation
from compressor.evaluation.run import evaluate_checkpoint
from compressor.pipelines.distill import run_distill
from compressor.pipelines.job import Job, prepare
from compressor.pipelines.mixed import with_plan
from compressor.pipelines.provenance import tool_section
from compressor.pipelines.quantize import Quantized, quantize
from compressor.recipes import EvaluateRecipe, Recipe
from compressor.reports.schema import (
    Check,
    Coverage,
    Data,
    Distillation,
    Evaluation,
    Layer,
    Model,
    Quantization,
    Report,
    Verification,
)
from compressor.reports.write import read_report, write_report
from compressor.sources.model import open_model
from compressor.sources.text import read_rows

_RESULT = "run.json"


def run_recipe(
    recipe: Recipe, *, command: str, overwrite: bool = False, dry_run: bool = False
) -> Report | None:
    """Run every step of ``recipe`` in its output directory. Returns the report, or None for a dry run."""
    started = time.monotonic()
    if recipe.output is None:
        raise UsageError("output: is needed: name the run directory in the recipe or with --output")
    if recipe.evaluate is not None:
        # Data of the last step is checked before the first one starts.
        read_rows(recipe.evaluate.data, column=recipe.evaluate.column, split=recipe.evaluate.split)
    output = recipe.output
    checkpoint = output / "checkpoint"
    distillation = None
    if recipe.distill is not None:
        if dry_run:
            prepare_distillation(recipe, output / "student", overwrite=True)
            return None  # what follows can only be checked on the student
        recipe, distillation = _distilled(recipe, output, overwrite=overwrite, started=started)
    asked = recipe
    if recipe.scan is not None and recipe.plan is None:
        raise UsageError("scan: serves nothing without a plan: give plan.budget, or drop scan")
    if recipe.plan is not None:
        recipe = with_plan(recipe, output, overwrite=overwrite, dry_run=dry_run)
    if dry_run:
        prepare(recipe)
        return None
    facts = _facts_of_finished(recipe, checkpoint, overwrite)
    if facts is None:
        done = quantize(recipe, checkpoint, overwrite=overwrite)
        facts = _facts(recipe, done)
        (output / _RESULT).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    else:
        note(f"{checkpoint}: already quantized and verified by this recipe; going on from there")

    source = open_model(
        recipe.model,
        revision=recipe.revision,
        trust_remote_code=recipe.trust_remote_code,
        allow_pickle=recipe.allow_pickle,
    )
    artifact = open_model(str(checkpoint), trust_remote_code=recipe.trust_remote_code, allow_quantized=True)
    evaluation = None
    warnings = list(facts["warnings"])
    device = recipe.device
    if recipe.evaluate is not None:
        preparation = prepare_evaluation(source, artifact, _evaluation_settings(recipe, recipe.evaluate))
        for message in preparation.warnings:
            warn(message)
        warnings += preparation.warnings
        device = preparation.device
        evaluation = Evaluation.of(evaluate_checkpoint(preparation))
    report = Report(
        tool=tool_section(
            command, asked.model_dump(mode="json"), seed=recipe.seed, device=device, started=started
        ),
        source=Model.of(model_facts(source)),
        artifact=Model.of(model_facts(artifact)),
        distillation=distillation,
        coverage=Coverage.model_validate(facts["coverage"]),
        quantization=Quantization.model_validate(facts["quantization"]),
        evaluation=evaluation,
        verification=Verification.model_validate(facts["verification"]),
        warnings=warnings,
    )
    write_report(report, output, overwrite=True)
    return report


def _distilled(
    recipe: Recipe, output: Path, *, overwrite: bool, started: float
) -> tuple[Recipe, Distillation | None]:
    """The rest of the recipe with the student in the model's place, and the report's section about it."""
    student = output / "student"
    if overwrite or not student.exists():
        job = prepare_distillation(recipe, student, overwrite=overwrite)
        run_distill(job, student, overwrite=overwrite, started=started)
    else:
        note(f"{student}: already distilled; going on from there")
    made = read_report(student)
    if made.tool.arguments.get("distill") != json.loads(recipe.model_dump_json())["distill"]:
        raise UsageError(f"{student}: distilled by another recipe: choose another output or pass --overwrite")
    rest = recipe.model_copy(update={"model": str(student), "revision": None, "distill": None})
    return rest, made.distillation


def _evaluation_settings(recipe: Recipe, evaluate: EvaluateRecipe) -> Settings:
    return Settings(
        data=evaluate.data,
        column=evaluate.column,
        split=evaluate.split,
        packing=evaluate.packing,
        samples=evaluate.samples,
        sequence_length=evaluate.sequence_length,
        batch_size=evaluate.batch_size,
        device=recipe.device,
        seed=recipe.seed,
        generations=evaluate.generations,
    )


def _recipe_digest(recipe: Recipe) -> str:
    """What the checkpoint depends on in the recipe."""
    part = recipe.model_dump(mode="json", exclude={"output", "evaluate"})
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def _facts_of_finished(recipe: Recipe, checkpoint: Path, overwrite: bool) -> dict[str, Any] | None:
    """The stored facts of a finished quantization of the same recipe, if there is one."""
    assert recipe.output is not None
    if not checkpoint.exists() or overwrite:
        return None
    try:
        facts = json.loads((recipe.output / _RESULT).read_text("utf-8"))
    except (OSError, ValueError):
        facts = {}
    if not isinstance(facts, dict) or facts.get("recipe") != _recipe_digest(recipe):
        raise UsageError(
            f"{checkpoint}: made by another recipe, or by a run that left no record: choose another output or pass --overwrite"
        )
    return facts


def _facts(recipe: Recipe, done: Quantized) -> dict[str, Any]:
    """What the report says of the quantization, as it is stored in ``run.json``."""
    coverage = done.sidecar["coverage"]
    return {
        "recipe": _recipe_digest(recipe),
        "warnings": list(done.job.warnings),
        "coverage": {
            "quantized_parameters": coverage["quantized_parameters"],
            "eligible_parameters": coverage["eligible_parameters"],
            "fraction": coverage["ratio"],
        },
        "quantization": _quantization(done).model_dump(mode="json"),
        "verification": _verification(done.checks).model_dump(mode="json"),
    }


def _quantization(done: Quantized) -> Quantization:
    job, settings = done.job, done.settings
    return Quantization(
        scheme=settings.scheme if settings.plan is None else f"plan {settings.plan}",
        method=settings.method,
        settings=settings.model_dump(mode="json"),
        calibration=None if job.tokens is None else Data.of(job.tokens.report),
        error_unit="share of the layer's output energy" if job.tokens is not None else None,
        seconds=done.seconds,
        peak_memory_bytes=done.peak_memory,
        layers=[_layer(job, record) for record in done.records] + _kept(job),
    )


def _layer(job: Job, record: dict[str, Any]) -> Layer:
    assignment = job.plan.layers[record["module"]]
    return Layer(
        module=record["module"],
        format=record["format"],
        method=record["method"],
        bits=job.format_of(record["module"]).bits_per_weight if False else None,
        bytes=assignment.bytes,
        error_before=record.get("error_rtn"),
        error_after=record.get("error"),
        block_error_before=record.get("block_error_before"),
        block_error_after=record.get("block_error"),
        tokens=record.get("tokens"),
        damping=record.get("damping"),
        seconds=record.get("seconds"),
        notes=[note for note in (assignment.reason, record.get("note")) if note],
    )


def _kept(job: Job) -> list[Layer]:
    return [Layer(module=name, skipped=a.reason or "kept by the plan") for name, a in job.plan.kept().items()]


def _verification(checks: list[CheckResult]) -> Verification:
    listed = [Check(name=c.name, passed=c.passed, detail=c.detail) for c in checks]
    return Verification(passed=all(c.passed for c in checks), checks=listed)
