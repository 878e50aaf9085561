"""``compressor scan-sensitivity``: how much each unit suffers from each format."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from compressor.console import out
from compressor.errors import UsageError

if TYPE_CHECKING:  # torch loads when the command runs, not for its help
    from compressor.sensitivity.estimate import ScanEstimate
    from compressor.sensitivity.scan import ScanJob
    from compressor.sensitivity.schema import Sensitivity

_WHAT, _DATA, _MODEL, _RUN = "What to score", "Calibration data", "Model", "Run"


def scan_sensitivity(
    model: Annotated[
        str,
        typer.Argument(
            help="Directory, hub id, .gguf file, or 'builtin' for the small demo model.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the scan to.")] = Path(
        "sensitivity.json"
    ),
    heat: Annotated[
        Path | None,
        typer.Option(
            "--heat-map",
            help="Draw blocks × unit kinds into this .svg, .png or .pdf file.",
            show_default=False,
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--formats",
            "-f",
            help="Candidates, comma-separated; bf16 (leave it) is always one.",
            rich_help_panel=_WHAT,
        ),
    ] = "w4g128,w4g64,w4g32,w8,bf16",
    score: Annotated[
        str,
        typer.Option(
            help="fisher: second-order KL with interactions, from a few backward passes. measured: KL of one unit at "
            "a time. output-mse: relative output error.",
            rich_help_panel=_WHAT,
        ),
    ] = "fisher",
    engine: Annotated[
        str | None,
        typer.Option(
            help="Only formats that vllm-cuda, vllm-cpu or transformers can load.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    rounding: Annotated[
        str, typer.Option(help="Weight rounding to assume: rtn or gptq.", rich_help_panel=_WHAT)
    ] = "rtn",
    draws: Annotated[
        int,
        typer.Option(
            min=1,
            help="Random directions a sequence (fisher): each is one backward pass.",
            rich_help_panel=_WHAT,
        ),
    ] = 4,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            help="builtin, a .txt/.jsonl/.json/.csv/.parquet file, a save_to_disk directory or a hub data set.",
            rich_help_panel=_DATA,
        ),
    ] = "builtin",
    column: Annotated[
        str | None,
        typer.Option(help="Column of the text or messages.", show_default=False, rich_help_panel=_DATA),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a data set.", show_default=False, rich_help_panel=_DATA)
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Sequences.", rich_help_panel=_DATA)] = 32,
    sequence_length: Annotated[
        int, typer.Option(min=8, help="Tokens in a sequence.", rich_help_panel=_DATA)
    ] = 256,
    memory: Annotated[
        float, typer.Option(min=0.01, help="GiB of activations at once.", rich_help_panel=_DATA)
    ] = 1.0,
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.", rich_help_panel=_RUN)] = "auto",
    seed: Annotated[int, typer.Option(help="Seed.", rich_help_panel=_RUN)] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at --output.", rich_help_panel=_RUN)
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, show memory, disk and time; write nothing.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Score every unit of a model in every format, for [bold]compressor plan[/bold].

    Example: [bold]compressor scan-sensitivity ./my-model -f w4g64,w4g32,w8 --engine vllm-cuda --data notes.txt[/bold]
    """
    from compressor.engines import check_name
    from compressor.pipelines.job import choose_device
    from compressor.planning.write import check_target
    from compressor.rounding.unit import Method
    from compressor.sensitivity.estimate import estimate
    from compressor.sensitivity.scan import ScanSettings, prepare, scan
    from compressor.sensitivity.schema import ScoreKind
    from compressor.sensitivity.show import fragile_table

    if score not in get_args(ScoreKind):
        raise UsageError(f"--score {score}: use {', '.join(get_args(ScoreKind))}")
    if rounding not in get_args(Method):
        raise UsageError(f"--rounding {rounding}: use {', '.join(get_args(Method))}")
    if heat is not None and heat.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--heat-map {heat}: name a .svg, .png or .pdf file")
    if not dry_run:
        check_target(output, overwrite)
        if heat is not None:
            check_target(heat, overwrite)
    check_name(engine)
    settings = ScanSettings(
        model=model,
        formats=tuple(name for name in formats.split(",") if name.strip()),
        score=score,  # type: ignore[arg-type]  # checked above
        engine=engine,
        rounding=rounding,  # type: ignore[arg-type]
        draws=draws,
        data=data,
        column=column,
        split=split,
        samples=samples,
        sequence_length=sequence_length,
        memory=memory,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    job = prepare(settings, choose_device(device))
    if dry_run:
        _show_estimate(job, estimate(job), as_json)
        return
    result = scan(job, output)
    _write(result, output, heat)
    if as_json:
        from compressor.cli.documents import Scanned, print_document

        print_document(Scanned(path=str(output), **dict(result)))
        return
    out.print(fragile_table(result))
    out.print(
        f"{output}: {len(result.units)} units × {len(result.formats)} formats from {result.tokens} tokens; "
        f"next: compressor plan {output} --budget 4.5bits",
        markup=False,
        highlight=False,
    )


def _write(result: "Sensitivity", output: Path, heat: Path | None) -> None:
    from compressor.sensitivity.schema import write_sensitivity
    from compressor.sensitivity.show import heat_map

    write_sensitivity(output, result)
    if heat is not None:
        heat.parent.mkdir(parents=True, exist_ok=True)
        heat_map(result, heat)


def _show_estimate(job: "ScanJob", cost: "ScanEstimate", as_json: bool) -> None:
    if as_json:
        from compressor.cli.documents import ScanChecked, print_document

        formats = {name: [fmt.name for fmt in found] for name, found in job.formats.items()}
        print_document(ScanChecked(estimate=cost, formats=formats, warnings=list(job.warnings)))
        return
    for message in job.warnings:
        out.print(f"warning: {message}", markup=False, highlight=False)
    for name, reason in job.graph.kept.items():
        out.print(f"kept: {name} ({reason})", markup=False, highlight=False)
    out.print(
        f"{cost.units} units, {cost.evaluations} unit × format pairs on {cost.tokens} tokens: memory about "
        f"{cost.memory_bytes / 1e9:.1f} GB, disk {cost.disk_bytes / 1e6:.0f} MB, time about {cost.seconds:.0f} s "
        f"on this {job.device.type}",
        markup=False,
        highlight=False,
    )
