"""``compressor distill``: a smaller or recovered student that is measured against its teacher."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from compressor.console import note, out
from compressor.errors import UsageError

_STUDENT, _DATA, _LOSS, _TEACHER, _TRAIN, _CHECK, _RUN = (
    "Student", "Data", "Loss", "Teacher", "Training", "Checks", "Run",
)  # fmt: skip


def distill(
    teacher: Annotated[
        str | None,
        typer.Argument(
            help="Directory, hub id, .gguf file, or 'builtin' for the demo model.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write the student to.", show_default=False),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", "-r", help="Recipe with defaults for all of this.", show_default=False),
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(
            "--student",
            "-s",
            help="A path or hub id, derive:layers=6, derive:params=50%[,axes=depth+ffn+heads][,score=influence|kl], or quantized:DIR to recover a quantized checkpoint.",
            rich_help_panel=_STUDENT,
            show_default=False,
        ),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train adapters of this rank only; merged at the end.",
            rich_help_panel=_STUDENT,
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="causal-lm, seq2seq, masked-lm, classification, multi-label, regression, token-classification or question-answering; else by the teacher's class.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Training data: builtin:train, a file, a save_to_disk directory or a hub data set.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    evaluate_data: Annotated[
        str | None,
        typer.Option(
            help="Data the best checkpoint is chosen by; else a tenth of the training data.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    test_data: Annotated[
        str | None,
        typer.Option(help="Data of the report's metrics.", rich_help_panel=_DATA, show_default=False),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="More metrics by the evaluate library: accuracy, macro_f1, matthews, spearman, squad, rouge, a path or a hub id. Repeatable.",
            rich_help_panel=_CHECK,
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            help="train=NAME, evaluate=NAME or test=NAME, for data sets with splits. Repeatable.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="ROLE=COLUMN: text, text_pair, label, prompt, completion, source, target, question, context, answers, tokens, tags. Repeatable.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    header: Annotated[
        str | None,
        typer.Option(
            help="Column names of .csv and .tsv files without header, comma-separated.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Training examples to use; all by default.", rich_help_panel=_DATA, show_default=False
        ),
    ] = None,
    evaluate_samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples to choose the best checkpoint by (500).",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    test_samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples of the report (10,000).", rich_help_panel=_DATA, show_default=False
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=8, help="Tokens of an example at most (256).", rich_help_panel=_DATA, show_default=False
        ),
    ] = None,
    augment: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Variants of each training example that only the teacher answers, for classification (0).",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    divergence: Annotated[
        str | None,
        typer.Option(
            help="fkl (forward KL, default), rkl, jsd, skl or srkl (skewed, as in DistiLLM).",
            rich_help_panel=_LOSS,
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="1 for language models, 3 for the rest.", rich_help_panel=_LOSS, show_default=False
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Weight of the teacher against the labels: 1 for language models, 0.7 for the rest.",
            rich_help_panel=_LOSS,
            show_default=False,
        ),
    ] = None,
    hidden: Annotated[
        float | None,
        typer.Option(help="Weight of the hidden-state MSE (0).", rich_help_panel=_LOSS, show_default=False),
    ] = None,
    relations: Annotated[
        float | None,
        typer.Option(
            help="Weight of the attention-relation KL (0).", rich_help_panel=_LOSS, show_default=False
        ),
    ] = None,
    teacher_dtype: Annotated[
        str | None,
        typer.Option(
            help="auto (as stored), float32, bfloat16, float16, int8 or nf4 (bitsandbytes).",
            rich_help_panel=_TEACHER,
            show_default=False,
        ),
    ] = None,
    teacher_device: Annotated[
        str | None,
        typer.Option(
            help="Where the teacher runs, if not with the student.",
            rich_help_panel=_TEACHER,
            show_default=False,
        ),
    ] = None,
    teacher_epochs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Train the teacher on the labels first; it is kept at OUTPUT-teacher.",
            rich_help_panel=_TEACHER,
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the teacher's targets: used if there, made if not.",
            rich_help_panel=_TEACHER,
            show_default=False,
        ),
    ] = None,
    cache_targets: Annotated[
        str | None,
        typer.Option(
            help="For language models: topk:64 (default) or rs:24; other tasks store all logits.",
            rich_help_panel=_TEACHER,
            show_default=False,
        ),
    ] = None,
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="Fill --cache and stop.", rich_help_panel=_TEACHER)
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps.", rich_help_panel=_TRAIN, show_default=False)
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Passes over the data: 1 for language models, 3 for the rest.",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(
            help="Training time at most: 90s, 10m, 1.5h, or a number of minutes.",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples of an optimizer step, over all processes (16).",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples at a time; changes memory, not results (8).",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            help="Peak learning rate (1e-4; of a quantized student in steps of its grid, 0.01).",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="cosine (default), linear or constant, after a warm-up.",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="adamw (default) or adamw8bit (bitsandbytes).", rich_help_panel=_TRAIN, show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 (default) or bfloat16 arithmetic; weights stay fp32.",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    dropout: Annotated[
        bool, typer.Option("--dropout", help="Keep the model's dropout on.", rich_help_panel=_TRAIN)
    ] = False,
    save_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between checkpoints, besides those at evaluations.",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    track: Annotated[
        str | None,
        typer.Option(
            help="auto (TensorBoard if installed), none, or a tracker of accelerate: wandb, mlflow, …",
            rich_help_panel=_TRAIN,
            show_default=False,
        ),
    ] = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Also train the same student on the labels alone, as long.",
            rich_help_panel=_CHECK,
        ),
    ] = False,
    min_accuracy_retention: Annotated[
        str | None,
        typer.Option(
            help="Fail (exit 3) below this share of the teacher's metric, as 0.97 or 97%.",
            rich_help_panel=_CHECK,
            show_default=False,
        ),
    ] = None,
    beat_control: Annotated[
        bool,
        typer.Option(
            "--beat-control", help="Fail (exit 3) unless better than the control.", rich_help_panel=_CHECK
        ),
    ] = False,
    on_inconclusive: Annotated[
        str | None,
        typer.Option(
            help="When a threshold lies inside the 95 % interval: fail (default), pass or warn.",
            rich_help_panel=_CHECK,
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda, cuda:N or mps.", rich_help_panel=_RUN, show_default=False),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of everything (0).", rich_help_panel=_RUN, show_default=False),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            help="Revision of the teacher, if it is a hub id.", rich_help_panel=_RUN, show_default=False
        ),
    ] = None,
    student_revision: Annotated[
        str | None,
        typer.Option(
            help="Revision of the student, if it is a hub id.", rich_help_panel=_RUN, show_default=False
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run model code that a checkpoint brings.", rich_help_panel=_RUN
        ),
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", help="Read pytorch_model.bin, which can run code.", rich_help_panel=_RUN
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an existing output, or an unfinished run of other settings.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=_RUN)
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check models, data and settings; train nothing.", rich_help_panel=_RUN
        ),
    ] = False,
) -> None:
    """Teach a student what a teacher knows, and measure whether it was worth it.

    The output is an ordinary checkpoint with report.html, .md and .json: teacher, student before and after,
    and with --control the same student without a teacher, on the same data with intervals. A killed run
    goes on where it stopped when the same command is given again. Under accelerate launch or torchrun it
    uses all processes.
    """
    from accelerate import PartialState

    from compressor.cli.documents import CacheFilled, DistillChecked, print_document
    from compressor.distillation.run import capture_only, prepare
    from compressor.pipelines.distill import run_distill
    from compressor.recipes import build_recipe
    from compressor.reports.gates import check_measured, of_distillation, raise_if_failed
    from compressor.reports.terminal import print_report
    from compressor.reports.write import read_report, report_json

    started = time.monotonic()
    values: dict[str, Any] = {
        "student": student, "student_revision": student_revision, "lora": lora, "task": task, "divergence": divergence, "temperature": temperature, "alpha": alpha,
        "hidden": hidden, "relations": relations, "teacher_dtype": teacher_dtype, "teacher_device": teacher_device,
        "teacher_epochs": teacher_epochs, "cache": cache, "cache_targets": cache_targets, "steps": steps,
        "epochs": epochs, "time_budget": time_budget, "batch_size": batch_size, "micro_batch": micro_batch,
        "learning_rate": learning_rate, "schedule": schedule, "optimizer": optimizer, "dtype": dtype,
        "dropout": dropout or None, "save_every": save_every, "metrics": metric or None, "track": track, "control": control or None,
        "data.train": data, "data.evaluate": evaluate_data, "data.test": test_data, "data.samples": samples,
        "data.length": length, "data.augment": augment, "data.evaluate_samples": evaluate_samples, "data.test_samples": test_samples, "data.header": None if header is None else header.split(","),
    }  # fmt: skip
    for option, pairs, allowed in (("split", split, ("train", "evaluate", "test")), ("column", column, None)):
        for pair in pairs or []:
            name, _, value = pair.partition("=")
            if not value or (allowed and name not in allowed):
                raise UsageError(f"--{option} {pair}: give {'|'.join(allowed) if allowed else 'ROLE'}=NAME")
            values[f"data.{name}_split" if option == "split" else f"data.columns.{name}"] = value
    overrides: dict[str, Any] = {f"distill.{key}": value for key, value in values.items()}
    overrides |= {
        "gate.min_accuracy_retention": min_accuracy_retention, "gate.beat_control": beat_control or None,
        "gate.on_inconclusive": on_inconclusive,
        "model": teacher, "output": output, "device": device, "seed": seed, "revision": revision,
        "trust_remote_code": trust_remote_code or None, "allow_pickle": allow_pickle or None,
    }  # fmt: skip
    resolved = build_recipe(recipe, overrides)
    if resolved.distill is None:
        raise UsageError("--student: name a model, derive:layers=N, derive:params=P% or quantized:DIRECTORY")
    if cache_only and resolved.distill.cache is None:
        raise UsageError("--cache-only: name the directory with --cache")
    if resolved.output is None and not cache_only:
        raise UsageError("--output: name the directory for the student")

    check_measured(resolved.model_copy(update={"gate": of_distillation(resolved)}))
    job = prepare(resolved, None if cache_only else resolved.output, overwrite=overwrite)
    if dry_run and as_json:
        print_document(
            DistillChecked(
                teacher=job.teacher.ref,
                task=job.task,
                training_examples=len(job.training),
                evaluation_examples=len(job.validation),
                test_examples=len(job.test),
                steps=job.schedule.steps,
                batch_size=job.schedule.batch_size,
                divergence=job.objective.kind,
                temperature=job.objective.temperature,
                alpha=job.objective.alpha,
                device=str(job.device),
            )
        )
        return
    if dry_run:
        schedule_text = (
            f"{job.schedule.steps or 'as many as fit'} steps of {job.schedule.batch_size} examples"
        )
        out.print(
            f"would distill {job.teacher.ref} for {job.task}: {len(job.training):,} training, {len(job.validation):,} evaluation "
            f"and {len(job.test):,} test examples; {schedule_text}; {job.objective.kind} at T={job.objective.temperature:g}, "
            f"α={job.objective.alpha:g}, on {job.device}",
            markup=False, highlight=False,
        )  # fmt: skip
        return
    if cache_only:
        size = capture_only(job)
        if as_json:
            print_document(CacheFilled(cache=str(job.settings.cache), bytes=size))
            return
        out.print(f"cache: {job.settings.cache}, {size:,} bytes", markup=False, highlight=False)
        return
    assert resolved.output is not None
    gate = run_distill(job, resolved.output, overwrite=overwrite, started=started)
    if not PartialState().is_main_process:
        return
    report = read_report(resolved.output)
    if as_json:
        out.file.write(report_json(report))
    else:
        print_report(report)
    note(f"student: {resolved.output}")
    raise_if_failed(gate, f"{resolved.output}: the student is kept, see its report.md")
