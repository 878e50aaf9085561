"""``compressor evaluate``: what compression cost, measured on the same tokens."""

# Help and usage errors must not wait for torch and transformers: they are imported when there is work.
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compressor.console import note, out, warn

if TYPE_CHECKING:
    from compressor.evaluation.prepare import Preparation

_MODELS, _DATA, _COMPUTE, _SPEED, _OUTPUT = "Models", "Data", "Compute", "Speed", "Output"


def evaluate(
    compressed: Annotated[
        str, typer.Argument(help="Checkpoint to evaluate: directory or hub id.", show_default=False)
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            "-b",
            help="The original it was made from. Without it only perplexity is measured.",
            rich_help_panel=_MODELS,
            show_default=False,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            help="Revision of COMPRESSED, if it is a hub id.", rich_help_panel=_MODELS, show_default=False
        ),
    ] = None,
    baseline_revision: Annotated[
        str | None,
        typer.Option(
            help="Revision of the baseline, if it is a hub id.", rich_help_panel=_MODELS, show_default=False
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run model code that a checkpoint brings.", rich_help_panel=_MODELS
        ),
    ] = False,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            help="builtin:test, a .txt/.jsonl/.json/.csv/.parquet file, a save_to_disk directory or a hub data set.",
            rich_help_panel=_DATA,
        ),
    ] = "builtin:test",
    column: Annotated[
        str | None,
        typer.Option(help="Column that holds the text.", rich_help_panel=_DATA, show_default=False),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of the data set.", rich_help_panel=_DATA, show_default=False)
    ] = None,
    packing: Annotated[
        str,
        typer.Option(
            help="concat: equal windows of the joined texts; rows: one sequence a row; auto chooses by the data.",
            rich_help_panel=_DATA,
        ),
    ] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="Sequences to evaluate.", rich_help_panel=_DATA)] = 64,
    sequence_length: Annotated[
        int, typer.Option(min=2, help="Tokens in a sequence.", rich_help_panel=_DATA)
    ] = 512,
    generations: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sequences that both models also continue greedily, to be read side by side.",
            rich_help_panel=_DATA,
        ),
    ] = 3,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, help="Sequences at a time; changes memory, not results.", rich_help_panel=_COMPUTE
        ),
    ] = 4,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.", rich_help_panel=_COMPUTE)
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16 or float16, for both models; auto is float32 on a CPU, elsewhere the baseline's own.",
            rich_help_panel=_COMPUTE,
        ),
    ] = "auto",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of sampling and intervals.", rich_help_panel=_COMPUTE)
    ] = 0,
    latency: Annotated[
        bool,
        typer.Option(
            "--latency",
            help="Also time both models in turns, and check inference for memory leaks (exit code 3).",
            rich_help_panel=_SPEED,
        ),
    ] = False,
    engine: Annotated[
        str, typer.Option(help="What is timed: transformers or vllm.", rich_help_panel=_SPEED)
    ] = "transformers",
    engine_python: Annotated[
        Path | None,
        typer.Option(help="Python with vllm, for --engine vllm.", rich_help_panel=_SPEED, show_default=False),
    ] = None,
    latency_batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.", rich_help_panel=_SPEED)] = 1,
    prompt_length: Annotated[
        int, typer.Option(min=1, help="Tokens in a prompt.", rich_help_panel=_SPEED)
    ] = 128,
    new_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens generated after it.", rich_help_panel=_SPEED)
    ] = 32,
    compile_mode: Annotated[
        str,
        typer.Option("--compile", help="none, reduce-overhead or max-autotune.", rich_help_panel=_SPEED),
    ] = "none",
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed inferences of each model.", rich_help_panel=_SPEED)
    ] = 20,
    warmup: Annotated[
        int, typer.Option(min=1, help="Inferences before them that do not count.", rich_help_panel=_SPEED)
    ] = 3,
    leak_runs: Annotated[
        int, typer.Option(min=0, help="Inferences of the leak check; 0 for none.", rich_help_panel=_SPEED)
    ] = 30,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Directory for report.html, report.md and report.json.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a report that is there.", rich_help_panel=_OUTPUT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=_OUTPUT)
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check models, tokenizers, data and memory; measure nothing.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
) -> None:
    """Measure perplexity, KL divergence and top-1 agreement against the original.

    Both models see exactly the same tokens through the same code; every number has a 95 % interval by
    paired bootstrap over sequences. Encoders are compared by their embeddings. With --latency also
    throughput, latency, peak memory and a leak check.
    """
    started = time.monotonic()
    from compressor.reports.write import check_report_directory, report_json, write_report

    if output is not None:
        check_report_directory(output, overwrite=overwrite)
    from compressor.checkpoint.serve import engine_interpreter
    from compressor.evaluation.prepare import Settings, prepare
    from compressor.evaluation.speed import SpeedSettings, check_settings, measure_speed
    from compressor.sources.model import open_model

    original = (
        open_model(
            baseline, revision=baseline_revision, trust_remote_code=trust_remote_code, allow_quantized=True
        )
        if baseline is not None
        else None
    )
    checkpoint = open_model(
        compressed, revision=revision, trust_remote_code=trust_remote_code, allow_quantized=True
    )
    settings = Settings(
        data=data,
        column=column,
        split=split,
        packing=packing,
        samples=samples,
        sequence_length=sequence_length,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        seed=seed,
        generations=generations,
    )
    preparation = prepare(original, checkpoint, settings)
    speed_settings = SpeedSettings(
        latency_batch, prompt_length, new_tokens, compile_mode, rounds, warmup, leak_runs
    )
    vllm_python = None
    if latency:
        check_settings(speed_settings, checkpoint, preparation.task, engine)
        if engine == "vllm":
            vllm_python = engine_interpreter(engine_python)
    for warning in preparation.warnings:
        warn(warning)
    if dry_run:
        _print_preparation(preparation, as_json)
        return

    from compressor.evaluation.facts import model_facts
    from compressor.evaluation.run import evaluate_checkpoint
    from compressor.pipelines.provenance import tool_section
    from compressor.reports.gates import raise_if_leaking
    from compressor.reports.schema import Evaluation, Model, Report, Speed
    from compressor.reports.terminal import print_report

    result = evaluate_checkpoint(preparation)
    speed = None
    if latency:
        speed = measure_speed(
            original,
            checkpoint,
            preparation.task,
            speed_settings,
            device=preparation.device,
            dtype=preparation.dtype,
            seed=seed,
            vllm_python=vllm_python,
        )
    arguments = {"compressed": compressed, "baseline": baseline, **asdict(settings)}
    report = Report(
        tool=tool_section("evaluate", arguments, seed=seed, device=preparation.device, started=started),
        source=Model.of(model_facts(original)) if original is not None else None,
        artifact=Model.of(model_facts(checkpoint)),
        evaluation=Evaluation.of(result),
        speed=Speed.of(speed) if speed is not None else None,
        warnings=list(preparation.warnings),
    )
    if as_json:
        out.file.write(report_json(report))
    else:
        print_report(report)
    if output is not None:
        note(f"report: {write_report(report, output, overwrite=overwrite)}")
    raise_if_leaking(report)


def _print_preparation(preparation: "Preparation", as_json: bool) -> None:
    from compressor.reports.wording import size

    if as_json:
        from compressor.cli.documents import EvaluateChecked, print_document
        from compressor.reports.schema import Data

        print_document(
            EvaluateChecked(
                task=preparation.task,
                device=preparation.device,
                dtype=preparation.dtype,
                data=Data.of(preparation.tokens.report),
                memory_needed_bytes=preparation.memory_needed,
                memory_available_bytes=preparation.memory_available,
                warnings=list(preparation.warnings),
            )
        )
        return
    tokens = int(preparation.tokens.attention_mask.sum())
    out.print(
        f"would evaluate as {preparation.task}: {len(preparation.tokens.input_ids)} sequences, {tokens:,} tokens, "
        f"{preparation.dtype} on {preparation.device}; about {size(preparation.memory_needed)} needed, "
        f"{size(preparation.memory_available)} free",
        markup=False,
        highlight=False,
    )
