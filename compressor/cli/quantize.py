"""``compressor quantize``: calibrate, round, write and verify a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from compressor.console import note, out

if TYPE_CHECKING:  # torch is only imported once a command runs, so that help is instant
    from compressor.pipelines.estimate import Estimate
    from compressor.pipelines.job import Job
    from compressor.recipes import Recipe

_WHAT, _HOW, _DATA, _RUN, _MODEL = "What to quantize", "Rounding", "Calibration data", "Run", "Model"


def quantize(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Directory, hub id, .gguf file, or 'builtin' for the small demo model.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write the checkpoint to.", show_default=False),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", "-r", help="Recipe with defaults for all of this.", show_default=False),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            "-s",
            help="w4g128 (default), w4g64, w4g32, w4, w8, w8g128, w8a8, fp8; or W4A16, W8A16, FP8_DYNAMIC.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="compressed-tensors (default), bitsandbytes with --scheme nf4 (its default) or int8, or onnx (int8).",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="plan.yaml with a format for every layer, instead of --scheme.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            help="fp8: also calibrate scales for an FP8 cache of keys and values.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers to keep: name, glob or re:REGEX. Repeatable; adds to the defaults.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers outside the blocks to quantize too, such as lm_head. Repeatable.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse, rather than shrink, a group size that does not divide.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Refuse formats that vllm-cuda, vllm-cpu or transformers cannot load.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    min_coverage: Annotated[
        float | None,
        typer.Option(
            help="Share of eligible parameters that must end up quantized.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="gptq (default); adaround, slower and better; rtn, which needs no data; or auto, the best within --time-budget.",
            show_default=False,
            rich_help_panel=_HOW,
        ),
    ] = None,
    scales: Annotated[
        str | None,
        typer.Option(
            help="mse (default: searched) or absmax, for rtn.", show_default=False, rich_help_panel=_HOW
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            help="GPTQ damping relative to the mean diagonal (default 0.01).",
            show_default=False,
            rich_help_panel=_HOW,
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            help="Steps of adaround for each block (default 100).", show_default=False, rich_help_panel=_HOW
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(
            help="For --method auto: 90s, 10m or 1.5h of rounding.", show_default=False, rich_help_panel=_HOW
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="builtin (default), a .txt/.jsonl/.json/.csv/.parquet file, a save_to_disk directory or a hub data set.",
            show_default=False,
            rich_help_panel=_DATA,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Column of the text or messages.", show_default=False, rich_help_panel=_DATA),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a data set.", show_default=False, rich_help_panel=_DATA)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Sequences (default 128).", show_default=False, rich_help_panel=_DATA)
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens in a sequence (default 512).", show_default=False, rich_help_panel=_DATA),
    ] = None,
    calibration_memory: Annotated[
        float | None,
        typer.Option(
            help="GiB of activations at once (default 1.5).", show_default=False, rich_help_panel=_DATA
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of a hub id.", show_default=False, rich_help_panel=_MODEL)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that the model brings.", rich_help_panel=_MODEL),
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Convert pytorch_model.bin (read with weights_only).",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    verify_engine: Annotated[
        str | None,
        typer.Option(
            help="Engine that must load the result: transformers (default), vllm.",
            show_default=False,
            rich_help_panel=_RUN,
        ),
    ] = None,
    engine_python: Annotated[
        Path | None,
        typer.Option(
            help="Python with vllm, for --verify-engine vllm.", show_default=False, rich_help_panel=_RUN
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="Hub id of the original, for the model card, where it came from disk.",
            show_default=False,
            rich_help_panel=_RUN,
        ),
    ] = None,
    signing_key: Annotated[
        Path | None,
        typer.Option(
            help="Private key (elliptic curve, PEM) to sign the checkpoint with, into model.sig.",
            show_default=False,
            rich_help_panel=_RUN,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto (default), cpu, cuda, cuda:N.", show_default=False, rich_help_panel=_RUN),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed (default 0).", show_default=False, rich_help_panel=_RUN)
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace what is at --output, once the new one is verified.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, show plan, memory, disk and time; write nothing.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Quantize a model and write a verified checkpoint that vLLM and transformers load.

    Example: [bold]compressor quantize ./my-model -o ./my-model-w4 --scheme w4g64 --data notes.txt[/bold]
    """
    from compressor.checkpoint.writer import refuse_source
    from compressor.pipelines.estimate import estimate, resolve_method
    from compressor.pipelines.job import prepare, refuse_existing
    from compressor.pipelines.quantize import quantize as run_quantize
    from compressor.recipes import build_recipe

    resolved = build_recipe(
        recipe,
        {
            "model": model,
            "output": output,
            "revision": revision,
            "base_model": base_model,
            "signing_key": signing_key,
            "trust_remote_code": trust_remote_code or None,
            "allow_pickle": allow_pickle or None,
            "seed": seed,
            "device": device,
            "quantize.format": output_format,
            "quantize.scheme": scheme,
            "quantize.plan": plan,
            "quantize.kv_cache": kv_cache,
            "quantize.method": method,
            "quantize.scales": scales,
            "quantize.damping": damping,
            "quantize.adaround.iterations": iterations,
            "quantize.time_budget": time_budget,
            "quantize.ignore": ignore or None,
            "quantize.include": include or None,
            "quantize.strict": strict or None,
            "quantize.min_coverage": min_coverage,
            "quantize.engine": engine,
            "quantize.calibration_memory": calibration_memory,
            "quantize.calibration.data": data,
            "quantize.calibration.column": column,
            "quantize.calibration.split": split,
            "quantize.calibration.samples": samples,
            "quantize.calibration.sequence_length": sequence_length,
            "verify.engine": verify_engine,
            "verify.engine_python": engine_python,
        },
    )
    if resolved.quantize.format != "compressed-tensors":
        _write_other(resolved, overwrite, dry_run, as_json)
        return
    if dry_run:
        if resolved.output is not None:
            refuse_existing(resolved.output, overwrite)
        job = prepare(resolved)
        if resolved.output is not None:
            refuse_source(resolved.output, job.source)
        job, resolved = resolve_method(job, resolved)
        _show_estimate(job, estimate(job, resolved), as_json)
        return
    result = run_quantize(resolved, resolved.output, overwrite=overwrite)
    coverage = result.sidecar["coverage"]
    if as_json:
        from compressor.cli.documents import QuantizedCheckpoint, print_document
        from compressor.reports.schema import Check

        print_document(
            QuantizedCheckpoint(
                path=str(result.path),
                seconds=round(result.seconds, 1),
                peak_memory_bytes=result.peak_memory,
                coverage=coverage["ratio"],
                checks=[Check.of(check) for check in result.checks],
                warnings=list(result.job.warnings),
            )
        )
        return
    note(f"{len(result.checks)} checks passed in all")
    out.print(
        f"{result.path}: {len(result.job.plan.quantized())} layers quantized, "
        f"{100 * coverage['ratio']:.1f} % of eligible parameters, {result.seconds:.0f} s",
        markup=False,
        highlight=False,
    )


def _write_other(recipe: "Recipe", overwrite: bool, dry_run: bool, as_json: bool) -> None:
    name = recipe.quantize.format
    assert name != "compressed-tensors"
    if name == "onnx":
        from compressor.pipelines.onnx import write_onnx as write
    else:
        from compressor.pipelines.bitsandbytes import write_bitsandbytes as write
    checks = write(recipe, recipe.output, overwrite=overwrite, dry_run=dry_run)
    if as_json:
        from compressor.cli.documents import OtherChecked, OtherCheckpoint, print_document
        from compressor.reports.schema import Check

        print_document(
            OtherChecked(format=name)
            if dry_run
            else OtherCheckpoint(path=str(recipe.output), checks=[Check.of(check) for check in checks])
        )


def _show_estimate(job: "Job", cost: "Estimate", as_json: bool) -> None:
    if as_json:
        from compressor.cli.documents import QuantizeChecked, print_document

        print_document(QuantizeChecked(plan=job.plan, estimate=cost))
        return
    table = Table("format", "layers", "size", title="plan")
    for name, (count, size) in cost.formats.items():
        table.add_row(name, str(count), f"{size / 1e6:.1f} MB")
    out.print(table)
    for message in job.warnings:
        out.print(f"warning: {message}", markup=False, highlight=False)
    for name, reason in cost.skipped.items():
        out.print(f"kept: {name} ({reason})", markup=False, highlight=False)
    out.print(
        f"memory about {cost.memory_bytes / 1e9:.1f} GB, disk {cost.disk_bytes / 1e6:.0f} MB, "
        f"time about {cost.seconds:.0f} s on this {job.device.type}",
        markup=False,
        highlight=False,
    )
