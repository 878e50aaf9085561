"""``compressor run``: a recipe from beginning to end."""

from pathlib import Path
from typing import Annotated

import typer

from compressor.console import note, out


def run(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Run directory, instead of the recipe's.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model, instead of the recipe's.", show_default=False)
    ] = None,
    signing_key: Annotated[
        Path | None,
        typer.Option(
            help="Private key (elliptic curve, PEM) to sign the checkpoint with, into model.sig.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N.", show_default=False)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed, instead of the recipe's.", show_default=False)
    ] = None,
    from_step: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Do this step and all after it again: distill, scan, plan, quantize, evaluate, speed or report.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's results.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run a recipe: distill, scan, plan, quantize, verify, evaluate against the original, report, gate.

    The run directory gets checkpoint/, report.html, .md and .json, and recipe.lock.yaml, which repeats the run. One
    that was interrupted goes on where it stopped; of one that is repeated with changes, what they touch is
    done again.
    """
    from compressor.cli.documents import RunChecked, print_document
    from compressor.pipelines.run import run_recipe, steps_of
    from compressor.recipes import build_recipe
    from compressor.reports.gates import raise_if_failed, raise_if_leaking
    from compressor.reports.terminal import print_report

    given = {"output": output, "model": model, "device": device, "seed": seed, "signing_key": signing_key}
    resolved = build_recipe(recipe, given)
    report = run_recipe(resolved, command="run", overwrite=overwrite, dry_run=dry_run, from_step=from_step)
    if report is None:
        note("dry run: everything that can be checked beforehand is in order")
        if as_json:
            print_document(RunChecked(steps=steps_of(resolved)))
        return
    if as_json:
        print_document(report)
    else:
        print_report(report)
        out.print(f"checkpoint: {resolved.output}/checkpoint", markup=False, highlight=False)
        out.print(f"report:     {resolved.output}/report.html", markup=False, highlight=False)
    raise_if_failed(report.gate, f"{resolved.output}: the checkpoint is kept, see report.html")
    raise_if_leaking(report)
