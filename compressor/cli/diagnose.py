"""``compressor diagnose``: where a compressed checkpoint loses accuracy, and the cheapest fix."""

from pathlib import Path
from typing import Annotated

import typer

from compressor.console import note, out

_DATA, _FIXES, _RUN = "Data", "Fixes", "Run"


def diagnose(
    original: Annotated[
        str,
        typer.Argument(help="The original: directory, hub id, .gguf file or 'builtin'.", show_default=False),
    ],
    compressed: Annotated[
        str, typer.Argument(help="The quantized checkpoint made from it.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Directory for diagnosis.json, diagnosis.svg and the edited plan.yaml.",
            show_default=False,
        ),
    ] = None,
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
    samples: Annotated[
        int,
        typer.Option(
            min=1,
            help="Sequences; fixes are rounded on half of them and measured on the others.",
            rich_help_panel=_DATA,
        ),
    ] = 32,
    sequence_length: Annotated[
        int, typer.Option(min=8, help="Tokens in a sequence.", rich_help_panel=_DATA)
    ] = 256,
    tries: Annotated[
        int,
        typer.Option("--try", min=0, help="Fixes to carry out and measure.", rich_help_panel=_FIXES),
    ] = 3,
    iterations: Annotated[
        int, typer.Option(min=1, help="Steps of adaround, for a fix that re-rounds.", rich_help_panel=_FIXES)
    ] = 50,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Only fixes that vllm-cuda, vllm-cpu or transformers can load.",
            show_default=False,
            rich_help_panel=_FIXES,
        ),
    ] = None,
    draws: Annotated[
        int,
        typer.Option(min=1, help="Backward passes behind the predictions.", rich_help_panel=_FIXES),
    ] = 4,
    memory: Annotated[
        float, typer.Option(min=0.01, help="GiB of activations at once.", rich_help_panel=_RUN)
    ] = 1.0,
    revision: Annotated[
        str | None,
        typer.Option(
            help="Revision of ORIGINAL, if it is a hub id.", show_default=False, rich_help_panel=_RUN
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that the model brings.", rich_help_panel=_RUN),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.", rich_help_panel=_RUN)] = "auto",
    seed: Annotated[int, typer.Option(help="Seed.", rich_help_panel=_RUN)] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is in --output.", rich_help_panel=_RUN)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything; measure nothing.", rich_help_panel=_RUN)
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show every layer, not only the worst.", rich_help_panel=_RUN)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Compare a checkpoint with its original layer by layer, and find the cheapest fix.

    Every layer's error is taken apart: rounded weights, quantized inputs, errors made before it. Fixes are ranked by
    the KL they are predicted to save per byte; the best few are carried out and measured.

    Example: [bold]compressor diagnose ./my-model ./my-model-w4 --data notes.txt -o diagnosis[/bold]
    """
    from compressor.engines import check_name

    check_name(engine)
    from compressor.diagnosis.job import DiagnoseSettings, open_job
    from compressor.diagnosis.run import check_directory
    from compressor.diagnosis.run import diagnose as run
    from compressor.diagnosis.schema import diagnosis_json
    from compressor.diagnosis.show import print_diagnosis
    from compressor.pipelines.job import choose_device

    if output is not None:
        check_directory(output, overwrite)
    settings = DiagnoseSettings(
        original=original,
        compressed=compressed,
        data=data,
        column=column,
        split=split,
        samples=samples,
        sequence_length=sequence_length,
        draws=draws,
        tries=tries,
        iterations=iterations,
        engine=engine,
        memory=memory,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    job = open_job(settings, choose_device(device))
    if dry_run:
        sequences, length = job.scan.tokens.input_ids.shape
        layers, blocks = len(job.formats), len(job.graph.blocks)
        if as_json:
            from compressor.cli.documents import DiagnoseChecked, print_document

            print_document(
                DiagnoseChecked(
                    layers=layers,
                    units=len(job.graph.units),
                    blocks=blocks,
                    sequences=sequences,
                    sequence_length=length,
                )
            )
            return
        out.print(
            f"would compare {layers} quantized layers in {blocks} blocks on {sequences} × {length} tokens",
            markup=False,
            highlight=False,
        )
        return
    found = run(job, output)
    if as_json:
        out.file.write(diagnosis_json(found.diagnosis))
    else:
        print_diagnosis(found.diagnosis, out, every)
    if output is not None:
        note(f"diagnosis: {output / 'diagnosis.json'}")
        if found.diagnosis.edited:
            note(
                f"next: compressor quantize {original} --plan {output / 'plan.yaml'} "
                f"--method {found.diagnosis.edited.method} -o NEW"
            )
