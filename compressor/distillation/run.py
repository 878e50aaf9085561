"""A whole distillation: check, load, derive, train, train the control, measure everything alike, report, publish."""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from compressor.console import note
from compressor.distillation.align import class_names, class_order, shared_vocabulary
from compressor.distillation.augment import augmented
from compressor.distillation.cache import (
    CachedTeacher,
    Identity,
    capture,
    check_identity,
    parse_kind,
    predicted_bytes,
    probe,
    tokenizer_digest,
    weights_digest,
)
from compressor.distillation.derive import Request, derive, parse_request
from compressor.distillation.directory import RunDirectory, check_target
from compressor.distillation.forward import RowModel, head_matches
from compressor.distillation.fused import Objective
from compressor.distillation.inner import make_inner_loss
from compressor.distillation.latency import measure_latency
from compressor.distillation.loop import Point, Progress, Teacher, Training, batches, decoder_start, train
from compressor.distillation.measure import Measured, better, generator, measured, score, value
from compressor.distillation.metric_library import compute, load_metrics
from compressor.distillation.models import load_model, save_processor, save_student, with_lora
from compressor.distillation.quantized import (
    QUANTIZED_LEARNING_RATE,
    QuantizedStudent,
    check_saved,
    make_trainable,
    open_quantized,
    save_quantized,
)
from compressor.distillation.result import Arm, Distilled, chosen_by, report_section
from compressor.distillation.tasks import (
    LANGUAGE_MODELS,
    TASKS,
    Batch,
    DataSpec,
    Examples,
    TaskName,
    read_examples,
    task_of,
)
from compressor.distillation.teacher import LiveTeacher, mass_outside, teacher_dtype
from compressor.errors import InputRefused, UsageError
from compressor.evaluation.bootstrap import Estimate
from compressor.evaluation.prepare import resolve_device, resolve_dtype
from compressor.graph.inputs import config_reads_speech
from compressor.recipes import DistillRecipe, Recipe
from compressor.reports.schema import Distillation
from compressor.sources.model import Source, load_tokenizer, open_model
from compressor.sources.tensors import file_sha256

_CALIBRATION = 8192  # tokens, at most, that importance is measured on


@dataclass(frozen=True)
class Job:
    """A checked distillation: everything that can be known before a weight is loaded."""

    recipe: Recipe
    settings: DistillRecipe
    task: TaskName
    teacher: Source
    student: Source | None
    request: Request | None
    quantized: QuantizedStudent | None
    training: Examples
    labelled: Examples  # of the training examples
    validation: Examples
    test: Examples
    objective: Objective
    schedule: Training
    device: str
    metrics: dict[str, Any]
    warnings: tuple[str, ...]


def prepare(recipe: Recipe, output: Path | None, *, overwrite: bool) -> Job:
    """Every check that needs no weights; reads and tokenizes the data. Without ``output`` only a cache is wanted.

    Raises UsageError, InputRefused or MachineLimit as its parts do.
    """
    assert recipe.distill is not None
    settings = recipe.distill
    if output is not None:
        check_target(output, overwrite=overwrite)
    teacher = _open(recipe, recipe.model, recipe.revision)
    task = _task(settings, teacher)
    request = student = quantized = None
    if settings.student is None:
        if output is not None:
            raise UsageError(
                "--student: name a model, derive:layers=N, derive:params=P% or quantized:DIRECTORY"
            )
    elif settings.student.startswith("derive:"):
        request = parse_request(settings.student.removeprefix("derive:"))
    elif settings.student.startswith("quantized:"):
        student = open_model(settings.student.removeprefix("quantized:"), allow_quantized=True)
        quantized = open_quantized(student)
        if settings.lora is not None:
            raise UsageError("--lora does not apply to a quantized student: its own weights are trained")
        if settings.teacher_epochs:
            raise UsageError("--teacher-epochs does not apply: a quantized student's teacher is its original")
    else:
        student = _open(recipe, settings.student, settings.student_revision)
    for package, asked, extra in (
        ("bitsandbytes", settings.optimizer == "adamw8bit", "--optimizer adamw8bit"),
        ("peft", settings.lora is not None, "--lora"),
    ):
        if asked and find_spec(package) is None:
            raise UsageError(f"{extra} needs {package}: pip install {package}")
    teacher_dtype(settings.teacher_dtype, "cpu")
    device = resolve_device(recipe.device)
    if settings.teacher_device is not None:
        resolve_device(settings.teacher_device)

    tokenizer = load_tokenizer(teacher)
    known = None if settings.teacher_epochs else _classes(teacher, task)
    labelled, validation, test, warnings = _data(settings, task, tokenizer, known, recipe.seed)
    training = _augmented(settings, task, labelled, tokenizer, recipe.seed)
    objective = _objective(settings, task)
    if settings.control and objective.alpha == 0:
        raise UsageError("--control is the student trained without a teacher, which --alpha 0 is already")
    if settings.cache is not None:
        parse_kind(settings.cache_targets, task)
        if settings.hidden or settings.relations:
            raise UsageError("--hidden and --relations need the live teacher: leave out --cache")
    if (settings.hidden or settings.relations) and teacher.config.get("is_encoder_decoder"):
        raise UsageError(
            "--hidden and --relations are for models with one stack of layers, not encoder-decoders"
        )
    return Job(
        recipe, settings, task, teacher, student, request, quantized, training, labelled, validation, test, objective,
        _schedule(settings, task, len(training), quantized=quantized is not None, seed=recipe.seed), device, load_metrics(settings.metrics), tuple(warnings),
    )  # fmt: skip


def _open(recipe: Recipe, ref: str, revision: str | None) -> Source:
    return open_model(
        ref, revision=revision, trust_remote_code=recipe.trust_remote_code, allow_pickle=recipe.allow_pickle
    )


def _task(settings: DistillRecipe, teacher: Source) -> TaskName:
    if config_reads_speech(teacher.config):
        (name,) = teacher.config["architectures"]
        raise InputRefused(f"{teacher.path}: {name} reads speech, and distill trains on text only")
    if settings.task is None:
        return task_of(teacher.config)
    if settings.task not in TASKS:
        raise UsageError(f"--task {settings.task}: choose {', '.join(TASKS)}")
    return settings.task


def _classes(source: Source, task: TaskName) -> tuple[str, ...] | None:
    """The class names a classifier's config states; None for other tasks."""
    if task not in ("classification", "multi-label", "token-classification"):
        return None
    names = source.config.get("id2label")
    if not names:
        return tuple(f"LABEL_{i}" for i in range(source.config.get("num_labels", 2)))
    return tuple(names[key] for key in sorted(names, key=int))


def _objective(settings: DistillRecipe, task: TaskName) -> Objective:
    soft = task not in LANGUAGE_MODELS
    temperature = settings.temperature or (3.0 if soft else 1.0)
    alpha = settings.alpha if settings.alpha is not None else (0.7 if soft else 1.0)
    return Objective(settings.divergence, temperature, alpha)


def _schedule(
    settings: DistillRecipe, task: TaskName, examples: int, *, quantized: bool, seed: int
) -> Training:
    steps = settings.steps
    epochs = settings.epochs
    if steps is None and epochs is None and settings.time_budget is None:
        epochs = 1.0 if task in LANGUAGE_MODELS else 3.0
    if epochs is not None:
        by_epochs = max(1, math.ceil(epochs * examples / settings.batch_size))
        steps = by_epochs if steps is None else min(steps, by_epochs)
    return Training(
        steps=steps,
        seconds=None if settings.time_budget is None else 60 * settings.time_budget,
        batch_size=settings.batch_size,
        micro_batch=settings.micro_batch,
        learning_rate=settings.learning_rate or (QUANTIZED_LEARNING_RATE if quantized else 1e-4),
        schedule=settings.schedule,
        warmup=settings.warmup,
        weight_decay=0.0 if quantized else settings.weight_decay,  # codes have no reason to be small
        clip=settings.clip,
        optimizer=settings.optimizer,
        dropout=settings.dropout,
        save_every=settings.save_every,
        seed=seed,
    )


def _data(
    settings: DistillRecipe, task: TaskName, tokenizer: Any, classes: Sequence[str] | None, seed: int
) -> tuple[Examples, Examples, Examples, list[str]]:
    """Training, validation and test examples; what is not given is held out from the training data."""
    data = settings.data
    warnings: list[str] = []

    def read(ref: str, split: str | None, samples: int | None, names: Sequence[str] | None) -> Examples:
        columns = tuple(sorted(data.columns.items()))
        spec = DataSpec(ref, split, data.header, columns, samples, data.length)
        return read_examples(task, spec, tokenizer, names, seed)

    training = read(data.train, data.train_split, data.samples, classes)
    names = classes or training.classes or None
    if data.evaluate is None:
        held = min(data.evaluate_samples, max(1, len(training) // 10))
        if len(training) < 10:
            raise InputRefused(
                f"{data.train}: {len(training)} examples are too few to hold some out: give --evaluate-data"
            )
        order = np.random.default_rng([seed, 0]).permutation(len(training)).tolist()
        validation = training.subset(sorted(order[:held]), f"{held} held out of {data.train}")
        training = training.subset(sorted(order[held:]), data.train)
    else:
        validation = read(data.evaluate, data.evaluate_split, data.evaluate_samples, names)
    test = validation
    if data.test is not None:
        test = read(data.test, data.test_split, data.test_samples, names)
        seen = {example.key for example in training.items} & {example.key for example in test.items}
        if seen:
            warnings.append(
                f"{len(seen)} test examples are training examples too: the metrics flatter all models"
            )
    else:
        warnings.append(
            "no --test-data: the report's metrics are on the data the best checkpoint was chosen by"
        )
    return training, validation, test, warnings


# ---- the work


Write = Callable[[Distillation, list[str], Path], None]
"""Puts the report beside the student before it is published: section, warnings, directory."""


def distill(job: Job, output: Path, *, overwrite: bool = False, write: Write) -> Distillation:
    """Do it. Leaves a plain checkpoint at ``output``, with what ``write`` put there."""
    warnings = list(job.warnings)
    accelerator = _accelerator(job, output.with_name(f".{output.name}.partial") / "output" / "logs")
    main = accelerator.is_main_process
    with RunDirectory(output, _fingerprint(job), overwrite=overwrite, main=main) as run:
        accelerator.wait_for_everyone()
        if job.settings.track != "none" and accelerator.log_with:
            accelerator.init_trackers("distill")
        teacher_source = job.teacher
        if job.settings.teacher_epochs:
            teacher_source = _fine_tuned(
                job, output.with_name(f"{output.name}-teacher"), run.path, accelerator
            )
        teacher = _load_teacher(job, teacher_source, accelerator)
        with accelerator.main_process_first():
            initial, layer_map = _initial(job, teacher_source, teacher, run.path / "initial", _pad_id(job))
        worker = _Worker(job, accelerator, teacher_source, teacher, initial, layer_map)
        progress = worker.train(run.path / "student", job.objective)
        control = None
        if job.settings.control:
            control = worker.train(run.path / "control", Objective(alpha=0.0), steps=progress.step)
        distilled = worker.finish(run, teacher_source, progress, control)
        section = report_section(distilled, job.settings)
        if accelerator.is_main_process:
            derived = run.path / "initial" / "derive.json"
            if derived.exists():
                shutil.copyfile(derived, run.output / "derive.json")
            write(section, [*warnings, *distilled.warnings], run.output)
            run.publish()
        accelerator.wait_for_everyone()
    accelerator.end_training()  # closes trackers, and the process group
    return section


def capture_only(job: Job) -> int:
    """Fill the cache and stop; returns its size in bytes. Raises as capturing does."""
    assert job.settings.cache is not None
    accelerator = _accelerator(job, None)
    source = job.teacher
    teacher = _load_teacher(job, source, accelerator)
    probe_batch = _probe_batch(job, teacher)
    fused = head_matches(teacher, job.task, probe_batch.to(next(teacher.parameters()).device))
    _cached(job, source, RowModel(teacher, teacher, job.task, fused=fused), None)
    return sum(file.stat().st_size for file in job.settings.cache.iterdir())


def _pad_id(job: Job) -> int:
    tokenizer = load_tokenizer(job.teacher)
    return int(next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0))


def _probe_batch(job: Job, model: Any) -> Batch:
    """A few short examples."""
    _, make = batches(job.validation, 4, pad_id=_pad_id(job), decoder_start=decoder_start(model))[-1]
    return make()


def _cached(job: Job, source: Source, rows: RowModel, vocabulary: int | None) -> CachedTeacher:
    """The cache of the training data's targets, captured as far as it is not there, and probed."""
    settings, directory = job.settings, job.settings.cache
    assert directory is not None
    kind = parse_kind(settings.cache_targets, job.task)
    sparse = kind.name != "dense"
    head = rows.bare.get_output_embeddings() if job.task in LANGUAGE_MODELS else None
    width = head.weight.shape[0] if head is not None else getattr(rows.bare.config, "num_labels", 2)
    identity = Identity(
        teacher=weights_digest(source.weight_files, source.config),
        tokenizer=tokenizer_digest(load_tokenizer(job.teacher)),
        data=job.training.sha256,
        length=settings.data.length,
        task=job.task,
        targets=f"{kind.name}:{kind.count}" if sparse else kind.name,
        temperature=job.objective.temperature if sparse else None,
        vocabulary=vocabulary,
        dtype=settings.teacher_dtype if settings.teacher_dtype in ("int8", "nf4") else str(rows.bare.dtype),
        seed=job.recipe.seed if kind.name == "rs" else None,
    )
    if kind.name != "dense" and job.objective.kind != "fkl":
        raise UsageError(
            f"--divergence {job.objective.kind} needs the whole distribution: use --divergence fkl with --cache"
        )
    check_identity(directory, identity)
    note(f"cache: {directory} takes {predicted_bytes(kind, job.training, width):,} bytes")
    common: dict[str, Any] = {
        "pad_id": _pad_id(job),
        "vocabulary": vocabulary,
        "temperature": job.objective.temperature,
    }
    capture(
        directory, identity, kind, rows, job.training, batch_size=settings.micro_batch, width=width, seed=job.recipe.seed, **common
    )  # fmt: skip
    teacher = CachedTeacher(directory, identity, kind, job.training)
    # Dense targets keep logits, so the temperature is applied when they are read.
    teacher.temperature = job.objective.temperature
    distance = probe(teacher, rows, job.training, seed=job.recipe.seed, **common)
    note(f"cache: {distance:.1e} nats a row from the live teacher on a few examples")
    return teacher


def _augmented(
    settings: DistillRecipe, task: TaskName, examples: Examples, tokenizer: Any, seed: int
) -> Examples:
    if not settings.data.augment:
        return examples
    if task != "classification":
        raise UsageError(f"--augment makes variants for classification, not for {task}")
    return augmented(
        examples, settings.data.augment, special_ids=frozenset(tokenizer.all_special_ids), seed=seed
    )  # fmt: skip


def _fingerprint(job: Job) -> dict[str, Any]:
    settings = job.settings.model_dump(mode="json", exclude={"save_every", "cache", "track", "metrics"})
    return {
        **settings,
        "teacher": {file.name: file_sha256(file) for file in job.teacher.weight_files},
        "student weights": {}
        if job.student is None
        else {f.name: file_sha256(f) for f in job.student.weight_files},
        "training data": job.training.sha256,
        "evaluation data": job.validation.sha256,
        "seed": job.recipe.seed,
    }


def _accelerator(job: Job, logs: Path | None) -> Accelerator:
    # It warns of tied weights at every checkpoint, which are restored as they should be.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    AcceleratorState._reset_state()  # its precision is process-wide, and another run may have set it
    track = job.settings.track if logs is not None else "none"
    if track == "auto":
        track = "tensorboard" if find_spec("tensorboard") else "none"
    accelerator = Accelerator(
        cpu=job.device == "cpu",
        mixed_precision="bf16" if job.settings.dtype == "bfloat16" else "no",
        log_with=None if track == "none" else track,
        project_dir=None if logs is None else str(logs),
    )
    return accelerator


def _load_teacher(job: Job, source: Source, accelerator: Accelerator) -> Any:
    device = job.settings.teacher_device or str(accelerator.device)
    arguments = teacher_dtype(job.settings.teacher_dtype, device)
    if job.settings.teacher_dtype == "auto":
        arguments = {"dtype": getattr(torch, resolve_dtype("auto", source, device))}
    model = load_model(source, job.task, device=device, arguments=arguments)
    shown = job.settings.teacher_dtype if job.settings.teacher_dtype in ("int8", "nf4") else str(model.dtype)
    note(f"teacher: {source.ref} on {device} in {shown.removeprefix('torch.')}")
    return model.requires_grad_(False)


def _fine_tuned(job: Job, directory: Path, path: Path, accelerator: Accelerator) -> Source:
    """The teacher after training it on the labels, kept at ``directory`` for later runs."""
    record = {"source": _fingerprint(job)["teacher"], "data": job.labelled.sha256, "seed": job.recipe.seed,
              "epochs": job.settings.teacher_epochs, "learning_rate": job.schedule.learning_rate}  # fmt: skip
    made = directory / "fine_tuning.json"
    if made.exists():
        if json.loads(made.read_text("utf-8")) != record:
            raise UsageError(
                f"{directory}: a teacher of other settings is there: remove it or choose another output"
            )
        note(f"teacher: {directory}, fine-tuned before")
        return open_model(str(directory))
    model = load_model(
        job.teacher, job.task, device=str(accelerator.device), classes=job.training.classes, new_head=True, seed=job.recipe.seed
    )  # fmt: skip
    tokenizer = load_tokenizer(job.teacher)
    steps = max(1, math.ceil(job.settings.teacher_epochs * len(job.labelled) / job.settings.batch_size))
    schedule = replace(job.schedule, steps=steps, seconds=None, save_every=None, dropout=True)
    train(
        model, None, job.labelled, Objective(alpha=0.0), schedule,
        accelerator=accelerator, directory=path / "teacher", pad_id=tokenizer.pad_token_id or 0,
        make_rows=lambda module: RowModel(module, model, job.task, fused=False),
        evaluate=lambda rows: value(job.task, score(rows, job.validation, pad_id=tokenizer.pad_token_id or 0, batch_size=32)),
        better=better(job.task), save_student=save_student, label="teacher", log=lambda v, s: accelerator.log(v, step=s),
    )  # fmt: skip
    if accelerator.is_main_process:
        tokenizer.save_pretrained(path / "teacher" / "best")
        (path / "teacher" / "best" / "fine_tuning.json").write_text(json.dumps(record) + "\n", "utf-8")
        (path / "teacher" / "best").rename(directory)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return open_model(str(directory))


def _initial(
    job: Job, source: Source, teacher: Any, directory: Path, pad_id: int
) -> tuple[Source, list[int] | None]:
    """The student before training, on disk, and for derived ones the teacher layer of each of its layers."""
    if job.student is not None:
        return job.student, None
    assert job.request is not None
    record = directory / "derive.json"
    if not record.exists():
        device = next(teacher.parameters()).device
        if job.settings.teacher_dtype in ("int8", "nf4"):  # a student is made of the teacher's own weights
            whole = {"dtype": getattr(torch, resolve_dtype("auto", source, device.type))}
            teacher = load_model(source, job.task, device=str(device), arguments=whole).requires_grad_(False)
        chosen = np.random.default_rng([job.recipe.seed, 1]).permutation(len(job.training))[
            : max(4, _CALIBRATION // job.settings.data.length)
        ]
        sample = job.training.subset(sorted(chosen.tolist()), "calibration")
        made = batches(sample, job.settings.micro_batch, pad_id=pad_id, decoder_start=decoder_start(teacher))
        student, derived = derive(teacher, job.request, [make().to(device) for _, make in made], job.task)
        student = student.float()
        save_student(student, directory, student.state_dict())
        save_processor(job.teacher, directory)
        facts = {
            "request": job.settings.student, "layers": derived.layers, "sizes": derived.sizes,
            "parameters": derived.parameters, "teacher_parameters": derived.teacher_parameters,
            "scores": derived.scores, "score": job.request.score, "kl": derived.kl,
        }  # fmt: skip
        record.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        kept = "; ".join(
            f"{path} keeps {', '.join(map(str, layers))}" for path, layers in derived.layers.items()
        )
        note(f"student: {derived.parameters:,} of {derived.teacher_parameters:,} parameters; {kept}")
    facts = json.loads(record.read_text("utf-8"))
    return open_model(str(directory)), next(iter(facts["layers"].values()))


class _Worker:
    """What both arms and all measurements share: the models' agreement, batches, the teacher's targets."""

    def __init__(
        self,
        job: Job,
        accelerator: Accelerator,
        source: Source,
        teacher: Any,
        initial: Source,
        layer_map: list[int] | None,
    ) -> None:
        self.job, self.accelerator = job, accelerator
        self.pad_id, self.tokenizer = _pad_id(job), load_tokenizer(job.teacher)
        self.initial, self.layer_map = initial, layer_map
        self.vocabulary: int | None = None
        self.classes = class_names(teacher.config) if job.training.classes else ()
        self._probe = _probe_batch(job, teacher)
        self.teacher_rows = self._rows(teacher, teacher)
        student = self._load(initial)
        if job.task in LANGUAGE_MODELS:
            sizes = [m.get_output_embeddings().weight.shape[0] for m in (teacher, student)]
            shared = shared_vocabulary(self.tokenizer, load_tokenizer(initial), *sizes)
            if shared < max(sizes):
                self.vocabulary = shared
                if sizes[0] > shared:
                    device = next(teacher.parameters()).device
                    mass = mass_outside(self.teacher_rows, self._probe.to(device), shared)
                    note(
                        f"vocabulary: {shared:,} ids are shared; the teacher gives {mass:.2e} of its probability to others"
                    )
        self.teacher: Teacher = LiveTeacher(
            self.teacher_rows, temperature=job.objective.temperature, vocabulary=self.vocabulary
        )
        if job.settings.cache is not None:
            with accelerator.main_process_first():
                self.teacher = _cached(job, source, self.teacher_rows, self.vocabulary)

    def _load(self, source: Source) -> Any:
        job = self.job
        new = job.student is not None and job.task not in LANGUAGE_MODELS and source is self.initial
        has_head = new and has_task_head(source)
        return load_model(
            source, job.task, device=str(self.accelerator.device), classes=self.classes, new_head=new and not has_head, seed=job.recipe.seed
        )  # fmt: skip

    def _rows(self, module: nn.Module, bare: Any) -> RowModel:
        device = next(bare.parameters()).device
        single = self.accelerator.distributed_type.value in ("NO", "MULTI_CPU", "MULTI_GPU")
        # A sharded head cannot be applied outside of its forward pass.
        fused = single and head_matches(bare, self.job.task, self._probe.to(device))
        order = None
        if self.classes:
            found = class_order(self.classes, class_names(bare.config))
            order = None if found is None else torch.tensor(found, device=device)
        return RowModel(module, bare, self.job.task, fused=fused, order=order)

    def train(self, directory: Path, objective: Objective, steps: int | None = None) -> Progress:
        job, accelerator = self.job, self.accelerator
        label = directory.name
        schedule = job.schedule if steps is None else replace(job.schedule, steps=steps, seconds=None)
        finished = directory / "finished.json"
        if finished.exists():
            return _progress(json.loads(finished.read_text("utf-8")))
        quantized = job.quantized
        by = chosen_by(job.task, job.settings, objective)
        student = self._load(job.teacher if quantized is not None else self.initial)
        save: Callable[[Any, Path, dict[str, Tensor]], None] = save_student
        if job.settings.lora is not None:
            student = with_lora(student, job.settings.lora, job.recipe.seed)
            save = _save_merged
        if quantized is not None:
            student = make_trainable(student, quantized)
            how = {"loss": job.objective.kind, "alpha": objective.alpha, "temperature": objective.temperature}

            def save(model: Any, directory: Path, state: dict[str, Tensor]) -> None:
                save_quantized(model, directory, quantized, how)

        if objective.alpha:
            head = self._rows(student, _bare(student))
            if job.task in LANGUAGE_MODELS and not head.fused:
                note(f"{label}: the output head is not a plain linear layer, so whole logits are made")
        inner = make_inner_loss(
            _bare(student), self.teacher_rows.bare, hidden=job.settings.hidden, relations=job.settings.relations,
            layer_map=self.layer_map, causal=job.task == "causal-lm",
        ) if objective.alpha else None  # fmt: skip
        progress = train(
            student,
            self.teacher if objective.alpha else None,
            job.training if objective.alpha else job.labelled,
            objective,
            schedule,
            accelerator=accelerator,
            directory=directory,
            pad_id=self.pad_id,
            make_rows=lambda module: self._rows(module, _bare(accelerator.unwrap_model(module))),
            evaluate=lambda rows: value(
                job.task, self._score(rows, job.validation, against_teacher=by == "kl"), by
            ),
            better=better(job.task, by),
            save_student=save,
            inner_loss=inner,
            vocabulary=self.vocabulary,
            log=lambda values, step: accelerator.log(values, step=step),
            label=label,
        )
        if accelerator.is_main_process:
            finished.write_text(json.dumps(asdict(progress)), "utf-8")
        accelerator.free_memory()
        return progress

    def _score(
        self,
        rows: RowModel,
        examples: Examples,
        against_teacher: bool = False,
        answered: dict[int, tuple[Any, Any]] | None = None,
    ) -> Any:
        generate = None
        if against_teacher and self.job.task == "seq2seq":
            generate = generator(rows.bare, self.tokenizer, self.job.settings.data.length)
        return score(
            rows, examples, pad_id=self.pad_id, batch_size=self.job.settings.micro_batch, vocabulary=self.vocabulary,
            teacher=self.teacher_rows if against_teacher else None, generate=generate, answered=answered,
        )  # fmt: skip

    def finish(
        self, run: RunDirectory, teacher: Source, progress: Progress, control: Progress | None
    ) -> Distilled:
        """Put the best student together as the output, reload it, and measure all models on the test data."""
        job = self.job
        best = run.path / "student" / "best"
        dtype = getattr(torch, resolve_dtype("auto", job.teacher))
        if self.accelerator.is_main_process and job.quantized is not None:
            shutil.copytree(best, run.output, dirs_exist_ok=True)
            check_saved(run.output, job.teacher)
        elif self.accelerator.is_main_process:
            # transformers writes the dtype of the parameters into config.json, so they are what is cast.
            student = self._load(open_model(str(best))).to(dtype)
            save_student(student, run.output, student.state_dict())
            save_processor(self.initial, run.output)
        self.accelerator.wait_for_everyone()
        sources = {"teacher": teacher, "before": self.initial, "after": _reopened(run.output)}
        if control is not None:
            sources["control"] = _reopened(run.path / "control" / "best")
        arms: dict[str, Arm] = {}
        for name, source in sources.items():
            rows = self.teacher_rows
            if name != "teacher":
                model = self._load(source)
                rows = self._rows(model, model)
            answered: dict[int, tuple[Any, Any]] = {}
            columns = self._score(rows, job.test, against_teacher=True, answered=answered)
            result: Measured = measured(job.task, columns, seed=job.recipe.seed)
            if job.metrics:
                pairs = list(answered.values())
                found = compute(job.metrics, [p for p, _ in pairs], [r for _, r in pairs])
                more = {key: Estimate(number, None, None) for key, number in found.items()}
                result = Measured({**result.metrics, **more}, columns)
            latency = None
            if name in ("teacher", "after") and self.accelerator.is_main_process:
                latency = measure_latency(
                    source.path, job.task, batch=job.settings.micro_batch, length=min(128, job.settings.data.length),
                    device=job.device, dtype="float32" if job.device == "cpu" else "bfloat16",
                )  # fmt: skip
            shown = {"teacher": source.ref, "before": str(job.settings.student)}.get(name, name)
            size = sum(file.stat().st_size for file in source.weight_files)
            # Counted in the file for the teacher: in memory bitsandbytes packs two weights into one element.
            stored = sum(entry.numel for entry in source.tensors.values())
            parameters = stored if name == "teacher" else sum(p.numel() for p in rows.bare.parameters())
            arms[name] = Arm(shown, parameters, size, result, latency)
        return Distilled(
            task=job.task, objective=job.objective, training=job.schedule, arms=arms, progress=progress, control=control,
            sources=(job.training, job.validation, job.test), seed=job.recipe.seed,
        )  # fmt: skip


def _reopened(directory: Path) -> Source:
    return open_model(str(directory), allow_quantized=True)


def has_task_head(source: Source) -> bool:
    """Whether a checkpoint is of a class with a head for classes or answers."""
    heads = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
    return any(head in name for head in heads for name in source.config.get("architectures") or [])


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _save_merged(model: Any, directory: Path, state: dict[str, Tensor]) -> None:
    import copy

    merged = copy.deepcopy(model).merge_and_unload()
    save_student(merged, directory, merged.state_dict())


def _progress(stored: dict[str, Any]) -> Progress:
    stored["curve"] = [Point(**point) for point in stored["curve"]]
    return Progress(**stored)


def digest(value: Any) -> str:
    """A short name for settings."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
