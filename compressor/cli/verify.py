"""``compressor verify``: prove a checkpoint before it is served."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from compressor.console import note, out
from compressor.errors import CompressorError, InputRefused, VerificationFailed

if TYPE_CHECKING:  # torch loads when the command runs, not for its help
    from compressor.checkpoint.verify import Check
    from compressor.sources.model import Source


class Engine(StrEnum):
    """What to start on the checkpoint."""

    transformers = "transformers"
    vllm = "vllm"


def verify(
    directory: Annotated[Path, typer.Argument(help="The quantized checkpoint.", show_default=False)],
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            "-s",
            help="The original: directory, hub id, .gguf file or 'builtin'. "
            "Without it, the one that compression.json names, if it is on this machine.",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of the source, if it is a hub id.", show_default=False)
    ] = None,
    engine: Annotated[
        Engine | None,
        typer.Option(
            "--engine",
            "-e",
            help="Load it in an engine's own process and compare: transformers, or vllm (and transformers).",
            show_default=False,
        ),
    ] = None,
    engine_python: Annotated[
        Path | None,
        typer.Option(help="Interpreter that has vllm (scripts/engine_env.sh makes one).", show_default=False),
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option(
            help="Also check model.sig, for the private half of this key (PEM) must have signed it.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check that files, config, plan and source agree, and that engines load what was written.

    Any compressed-tensors checkpoint can be verified; those that compressor wrote are also held against
    their plan. Exits with 4 when a check fails.
    """
    if not directory.is_dir():
        raise InputRefused(f"{directory}: no such directory")
    from compressor.checkpoint.verify import verify as verify_checkpoint
    from compressor.sources.model import open_model

    original = (
        open_model(source, revision=revision, trust_remote_code=trust_remote_code)
        if source is not None
        else _named_source(directory, trust_remote_code)
    )
    checks = verify_checkpoint(
        directory,
        source=original,
        engine=engine.value if engine is not None else None,
        engine_python=engine_python,
        public_key=public_key,
        trust_remote_code=trust_remote_code,
    )
    failed = [check for check in checks if not check.passed]
    if as_json:
        from compressor.cli.documents import Verified, print_document
        from compressor.reports.schema import Check

        ref = original.ref if original is not None else None
        found = [Check.of(check) for check in checks]
        print_document(Verified(checkpoint=str(directory), source=ref, passed=not failed, checks=found))
    else:
        out.print(_table(checks))
    if failed:
        raise VerificationFailed(
            f"{directory}: {len(failed)} of {len(checks)} checks failed, first {failed[0].name}: {failed[0].detail}"
        )


def _named_source(directory: Path, trust_remote_code: bool) -> "Source | None":
    """The source that the sidecar names, if it can be opened without a download."""
    from compressor.checkpoint.sidecar import read_sidecar
    from compressor.sources.model import open_model

    try:
        sidecar = read_sidecar(directory)
        if sidecar is None or sidecar.source.kind == "hub":
            note("no --source: the checkpoint is not compared with its original")
            return None
        return open_model(sidecar.source.ref, trust_remote_code=trust_remote_code)
    except CompressorError as error:
        note(f"no --source, and the one in compression.json cannot be opened: {error}")
        return None


def _table(checks: list["Check"]) -> Table:
    table = Table("check", "result", "found", title=None)
    for check in checks:
        skipped = check.passed and check.detail.startswith("skipped")
        result = (
            "[red]failed[/red]"
            if not check.passed
            else "[dim]skipped[/dim]"
            if skipped
            else "[green]passed[/green]"
        )
        detail = check.detail.removeprefix("skipped: ").replace("[", r"\[")
        table.add_row(check.name, result, detail)
    return table
