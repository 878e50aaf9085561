"""The whole pipeline of a recipe: distill, scan, plan, quantize and verify, evaluate, time, report and hold it to the gate.

The run directory gets::

    recipe.lock.yaml        every value of the recipe, versions, digests of the inputs
    run.json                what each step was made from, and what it found (see ``record``)
    student/                with ``distill``: the student and its own report
    sensitivity.json, .svg  with ``plan``: the scan
    plan.yaml               the plan; when it is edited, quantization and what follows are done again with it
    checkpoint/             the verified checkpoint with model card, provenance and checksums
    report.json, .md, .html

A killed run goes on where it stopped; of a run that is repeated with changes, what they touch is done again.
"""

import hashlib
import json
import time
from typing import Any

from compressor.checkpoint.release import write_release
from compressor.checkpoint.serve import engine_interpreter
from compressor.checkpoint.sidecar import read_sidecar
from compressor.checkpoint.signature import check_key, sign
from compressor.checkpoint.verify import Check as CheckResult
from compressor.console import note, warn
from compressor.distillation.run import prepare as prepare_distillation
from compressor.errors import UsageError
from compressor.evaluation.facts import model_facts
from compressor.evaluation.load import task_of
from compressor.evaluation.prepare import Settings
from compressor.evaluation.prepare import prepare as prepare_evaluation
from compressor.evaluation.run import evaluate_checkpoint
from compressor.evaluation.speed import SpeedSettings, measure_speed
from compressor.evaluation.speed import check_settings as check_speed
from compressor.pipelines.distill import run_distill
from compressor.pipelines.job import Job, choose_device, open_recipe_model, prepare
from compressor.pipelines.lock import (
    check_locked,
    data_digest,
    inputs,
    model_digest,
    versions,
    write_lock,
)
from compressor.pipelines.mixed import check_mixed, make_and_write_plan, scan_and_write, scan_section
from compressor.pipelines.provenance import tool_section
from compressor.pipelines.quantize import Quantized, quantize
from compressor.pipelines.record import STEPS, RunRecord
from compressor.recipes import EvaluateRecipe, LatencyRecipe, Recipe, ScanRecipe
from compressor.reports.gates import check_gate, check_measured, of_distillation, raise_if_failed
from compressor.reports.schema import (
    Check,
    Coverage,
    Data,
    Distillation,
    Evaluation,
    Layer,
    Model,
    Planning,
    Quantization,
    Report,
    Scan,
    Speed,
    Verification,
)
from compressor.reports.write import REPORT_JSON, read_report, write_report
from compressor.sensitivity.schema import read_sensitivity
from compressor.sources.model import longest_sequence, open_model
from compressor.sources.tensors import file_sha256
from compressor.sources.text import read_rows


def run_recipe(
    recipe: Recipe,
    *,
    command: str,
    overwrite: bool = False,
    dry_run: bool = False,
    from_step: str | None = None,
) -> Report | None:
    """Run every step of ``recipe`` in its output directory that is not done. Returns the report, or None for a dry run.

    ``from_step`` is done again with all that follow it. The report's gate may have failed: that is for the caller to
    raise. Raises GateFailed only for a student that is not worth going on with.
    """
    started = time.monotonic()
    if recipe.output is None:
        raise UsageError("output: is needed: name the run directory in the recipe or with --output")
    if from_step is not None and from_step not in steps_of(recipe):
        raise UsageError(f"--from {from_step}: the steps of this recipe are {', '.join(steps_of(recipe))}")
    if recipe.quantize.format != "compressed-tensors":
        raise UsageError(
            f"quantize.format: run makes compressed-tensors; use quantize for {recipe.quantize.format}"
        )
    check_measured(recipe)
    check_mixed(recipe)
    if recipe.signing_key is not None:
        check_key(recipe.signing_key)
    # Data of the last steps is checked before the first one starts.
    if recipe.evaluate is not None:
        read_rows(recipe.evaluate.data, column=recipe.evaluate.column, split=recipe.evaluate.split)
    if recipe.quantize.method != "rtn" or recipe.quantize.kv_cache is not None:
        calibration = recipe.quantize.calibration
        read_rows(calibration.data, column=calibration.column, split=calibration.split)
    _check_evaluation(recipe)
    if dry_run:
        _check_only(recipe)
        return None
    found = inputs(recipe)
    if recipe.locked is not None:
        check_locked(recipe.locked, found)
    device = str(choose_device(recipe.device))
    run = _Run(recipe, RunRecord(recipe.output, overwrite=overwrite), found, device, started)
    if from_step is not None:
        run.record.forget_from(from_step)
    write_lock(recipe, found, device, recipe.output)
    return run.all(command)


def steps_of(recipe: Recipe) -> list[str]:
    """The steps that the recipe asks for, in order."""
    given: dict[str, Any] = {
        "distill": recipe.distill,
        "scan": recipe.plan,
        "plan": recipe.plan,
        "evaluate": recipe.evaluate,
        "speed": None if recipe.evaluate is None else recipe.evaluate.latency,
    }
    return [step for step in STEPS if given.get(step, True) is not None]


def _check_evaluation(recipe: Recipe) -> None:
    """Raise UsageError, before any work, for what cannot be evaluated or timed of the model."""
    if recipe.evaluate is None:
        return
    source = open_recipe_model(recipe)
    if recipe.evaluate.latency is not None:
        latency = recipe.evaluate.latency
        try:
            check_speed(speed_settings(latency), source, task_of(source.config, source.path), latency.engine)
        except UsageError as error:
            raise UsageError(f"evaluate.latency: {error}") from None
        if latency.engine == "vllm":
            engine_interpreter(latency.engine_python)
    longest = longest_sequence(source.config)
    if longest is not None and recipe.evaluate.sequence_length > longest:
        raise UsageError(
            f"evaluate.sequence_length: {recipe.evaluate.sequence_length} is more than the model's "
            f"max_position_embeddings {longest}"
        )


def _check_only(recipe: Recipe) -> None:
    assert recipe.output is not None
    if recipe.distill is not None:
        prepare_distillation(recipe, recipe.output / "student", overwrite=True)
    elif recipe.plan is not None:
        scan_and_write(recipe, recipe.output, dry_run=True)
    else:
        prepare(recipe)  # what follows a distillation can only be checked on the student


class _Run:
    """One run: each method is a step, which is skipped when the record says that it is done."""

    def __init__(
        self, recipe: Recipe, record: RunRecord, found: dict[str, str], device: str, started: float
    ) -> None:
        assert recipe.output is not None
        self.asked = self.recipe = recipe  # the second changes as steps resolve it
        self.record = record
        self.output = recipe.output
        self.started = started
        self._inputs = found
        self._model = found["model"]
        self._device = device
        self._common = {"versions": versions(), "device": device, "seed": recipe.seed}

    def all(self, command: str) -> Report:
        distillation = self.distill() if self.recipe.distill is not None else None
        planning = None
        if self.recipe.plan is not None:
            self.scan()
            planning = self.plan()
        quantized = self.quantize()
        evaluated = self.evaluate() if self.recipe.evaluate is not None else None
        speed = self.speed(evaluated) if evaluated is not None and "speed" in steps_of(self.asked) else None
        return self.report(command, distillation, planning, quantized, evaluated, speed)

    def distill(self) -> Distillation | None:
        """The student takes the model's place in the rest of the recipe. Raises GateFailed."""
        recipe, student = self.recipe, self.output / "student"
        assert recipe.distill is not None
        settings = recipe.distill.model_dump(mode="json", exclude={"save_every", "cache", "track"})
        made_from = self._made_from("distill", "model", distill=settings)
        if not self.record.done("distill", made_from, student):
            if not self.record.published("distill", made_from, student):
                overwrite = self.record.start("distill", made_from, student)
                job = prepare_distillation(recipe, student, overwrite=overwrite)
                run_distill(job, student, overwrite=overwrite, started=self.started)
            self.record.finish("distill", {})
        made = read_report(student)
        gate = check_gate(made, of_distillation(recipe))
        raise_if_failed(gate, f"{student}: the student is kept, see its report.md")
        self.recipe = recipe.model_copy(update={"model": str(student), "revision": None, "distill": None})
        self._model = model_digest(open_model(str(student)))
        return made.distillation

    def scan(self) -> None:
        recipe, file = self.recipe, self.output / "sensitivity.json"
        settings = (recipe.scan or ScanRecipe()).model_dump(mode="json")
        made_from = self._made_from("scan", model=self._model, scan=settings, engine=recipe.quantize.engine)
        made_from["inputs"] |= {"scan.data.data": data_digest(settings["data"]["data"])}
        if not self.record.done("scan", made_from, file):
            self.record.start("scan", made_from, file)
            scan_and_write(recipe, self.output)
            self.record.finish("scan", {})

    def plan(self) -> dict[str, Any] | None:
        """The report's section about the plan; None when the plan was edited since."""
        recipe, file = self.recipe, self.output / "plan.yaml"
        assert recipe.plan is not None
        made_from = self._made_from(
            "plan",
            "plan.costs",
            model=self._model,
            plan=recipe.plan.model_dump(mode="json"),
            engine=recipe.quantize.engine,
            scan=file_sha256(self.output / "sensitivity.json"),
        )
        if not self.record.done("plan", made_from, file):
            self.record.start("plan", made_from, file)
            planning = make_and_write_plan(recipe, self.output)
            made = {"planning": planning.model_dump(mode="json"), "sha256": file_sha256(file)}
            self.record.finish("plan", made)
        update = {"quantize": recipe.quantize.model_copy(update={"plan": file}), "scan": None, "plan": None}
        self.recipe = recipe.model_copy(update=update)
        facts = self.record.facts("plan")
        if file_sha256(file) != facts["sha256"]:
            note(f"{file}: edited since it was made: what was predicted for it no longer holds")
            return None
        return dict(facts["planning"])

    def quantize(self) -> dict[str, Any]:
        recipe, checkpoint = self.recipe, self.output / "checkpoint"
        plan = recipe.quantize.plan
        made_from = self._made_from(
            "quantize",
            "quantize.calibration.data",
            model=self._model,
            quantize=recipe.quantize.model_dump(mode="json", exclude={"plan"}),
            plan=None if plan is None or not plan.is_file() else file_sha256(plan),
            verify=recipe.verify.model_dump(mode="json"),
        )
        if not self.record.done("quantize", made_from, checkpoint):
            overwrite = self.record.start("quantize", made_from, checkpoint)
            self.record.finish("quantize", _facts(quantize(recipe, checkpoint, overwrite=overwrite)))
        facts: dict[str, Any] = self.record.facts("quantize")
        return facts

    def evaluate(self) -> dict[str, Any]:
        recipe = self.recipe
        assert recipe.evaluate is not None
        made_from = self._made_from(
            "evaluate",
            "evaluate.data",
            model=self._model,
            evaluate=recipe.evaluate.model_dump(mode="json", exclude={"latency"}),
            checkpoint=self._weights(),
        )
        if not self.record.done("evaluate", made_from, None):
            self.record.start("evaluate", made_from, None)
            source = open_recipe_model(recipe)
            artifact = self._artifact()
            preparation = prepare_evaluation(source, artifact, _evaluation_settings(recipe, recipe.evaluate))
            for message in preparation.warnings:
                warn(message)
            evaluation = Evaluation.of(evaluate_checkpoint(preparation))
            facts = {
                "evaluation": evaluation.model_dump(mode="json"),
                "warnings": list(preparation.warnings),
                "device": preparation.device,
            }
            self.record.finish("evaluate", facts)
        found: dict[str, Any] = self.record.facts("evaluate")
        return found

    def speed(self, evaluated: dict[str, Any]) -> dict[str, Any]:
        """The report's section about speed, as the evaluation found task, device and dtype."""
        recipe = self.recipe
        assert recipe.evaluate is not None
        latency = recipe.evaluate.latency
        assert latency is not None
        made_from = self._made_from(
            "speed",
            model=self._model,
            latency=latency.model_dump(mode="json"),
            checkpoint=self._weights(),
        )
        if not self.record.done("speed", made_from, None):
            self.record.start("speed", made_from, None)
            evaluation = evaluated["evaluation"]
            found = measure_speed(
                open_recipe_model(recipe),
                self._artifact(),
                evaluation["task"],
                speed_settings(latency),
                device=evaluation["device"],
                dtype=evaluation["dtype"],
                seed=recipe.seed,
                vllm_python=engine_interpreter(latency.engine_python) if latency.engine == "vllm" else None,
            )
            self.record.finish("speed", Speed.of(found).model_dump(mode="json"))
        facts: dict[str, Any] = self.record.facts("speed")
        return facts

    def report(
        self,
        command: str,
        distillation: Distillation | None,
        planning: dict[str, Any] | None,
        quantized: dict[str, Any],
        evaluated: dict[str, Any] | None,
        speed: dict[str, Any] | None,
    ) -> Report:
        """Report, gate and model card."""
        recipe, checkpoint = self.recipe, self.output / "checkpoint"
        sections: dict[str, Any] = {
            "distillation": None if distillation is None else distillation.model_dump(mode="json"),
            "planning": planning,
            **{key: quantized[key] for key in ("coverage", "quantization", "verification")},
            "evaluation": None if evaluated is None else evaluated["evaluation"],
            "speed": speed,
        }
        made_from = self._made_from(
            "report",
            sections=hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest(),
            gate=recipe.gate.model_dump(mode="json"),
            base_model=recipe.base_model,
            signing_key=recipe.signing_key,
            checkpoint=self._weights(),
        )
        file = self.output / REPORT_JSON
        if self.record.done("report", made_from, file):
            return read_report(file)
        self.record.start("report", made_from, None)
        report = Report(
            tool=tool_section(
                command,
                self.asked.model_dump(mode="json", exclude={"locked"}),
                seed=recipe.seed,
                device=self._device,
                started=self.started,
            ),
            source=Model.of(model_facts(open_recipe_model(recipe))),
            artifact=Model.of(model_facts(self._artifact())),
            distillation=distillation,
            scan=self._scan(),
            planning=None if planning is None else Planning.model_validate(planning),
            coverage=Coverage.model_validate(quantized["coverage"]),
            quantization=Quantization.model_validate(quantized["quantization"]),
            evaluation=None if evaluated is None else Evaluation.model_validate(evaluated["evaluation"]),
            speed=None if speed is None else Speed.model_validate(speed),
            verification=Verification.model_validate(quantized["verification"]),
            warnings=[*quantized["warnings"], *([] if evaluated is None else evaluated["warnings"])],
        )
        try:
            report = report.model_copy(update={"gate": check_gate(report, recipe.gate)})
        except UsageError:  # a threshold on a number that this kind of model does not have
            write_report(report, self.output, overwrite=True)
            raise
        # A student is no quantized copy of the model that it learned from.
        base_model = recipe.base_model if self.asked.distill is None else None
        write_release(checkpoint, base_model=base_model, report=report)
        if recipe.signing_key is not None:
            sign(checkpoint, recipe.signing_key)
        write_report(report, self.output, overwrite=True)
        self.record.finish("report", {})
        return report

    def _made_from(self, step: str, *keys: str, **more: Any) -> dict[str, Any]:
        """What a step depends on: the inputs named by ``keys``, for a distillation its data and student too."""
        given = {
            key: digest
            for key, digest in self._inputs.items()
            if key in keys or (step == "distill" and key.startswith("distill."))
        }
        return {**self._common, "inputs": given, **more}

    def _scan(self) -> Scan | None:
        if self.asked.plan is None:
            return None
        return scan_section(read_sensitivity(self.output / "sensitivity.json"))

    def _weights(self) -> dict[str, str]:
        sidecar = read_sidecar(self.output / "checkpoint")
        assert sidecar is not None
        return sidecar.files

    def _artifact(self) -> Any:
        checkpoint = str(self.output / "checkpoint")
        return open_model(checkpoint, trust_remote_code=self.recipe.trust_remote_code, allow_quantized=True)


def speed_settings(latency: LatencyRecipe) -> SpeedSettings:
    return SpeedSettings(**latency.model_dump(exclude={"engine", "engine_python"}))


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


def _facts(done: Quantized) -> dict[str, Any]:
    """What the report says of the quantization, as it is stored in ``run.json``."""
    coverage = done.sidecar["coverage"]
    return {
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
        **_size(job, record["module"]),
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
    return [
        Layer(module=name, skipped=a.reason or "kept by the plan", **_size(job, name))
        for name, a in job.plan.kept().items()
    ]


def _size(job: Job, name: str) -> dict[str, Any]:
    """Parameters, bytes and bits a weight of a layer, as far as they are known."""
    stored = job.skeleton.stored.get(f"{name}.weight")
    planned = job.plan.layers[name].bytes
    if stored is None:
        return {"bytes": planned}
    size = planned if planned is not None and name in job.plan.quantized() else stored.nbytes
    return {"parameters": stored.numel, "bytes": size, "bits": 8 * size / stored.numel}


def _verification(checks: list[CheckResult]) -> Verification:
    listed = [Check(name=c.name, passed=c.passed, detail=c.detail) for c in checks]
    return Verification(passed=all(c.passed for c in checks), checks=listed)
