"""``compressor gate``: thresholds on a report, for CI."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from compressor.console import out, warn
from compressor.errors import UsageError

_THRESHOLDS, _OUTPUT = "Thresholds", "Output"


def gate(
    report: Annotated[
        Path, typer.Argument(help="report.json, or the directory that holds it.", show_default=False)
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="Take the thresholds of this recipe's gate section; options win over it.",
            rich_help_panel=_THRESHOLDS,
            show_default=False,
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="KL(original ‖ compressed), nats per token.", rich_help_panel=_THRESHOLDS, show_default=False
        ),
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            help="Perplexity over the original's, less one: 2% or 0.02.",
            rich_help_panel=_THRESHOLDS,
            show_default=False,
        ),
    ] = None,
    min_top1: Annotated[
        str | None,
        typer.Option(
            help="Tokens on whose first choice both agree: 95% or 0.95.",
            rich_help_panel=_THRESHOLDS,
            show_default=False,
        ),
    ] = None,
    min_cosine: Annotated[
        str | None,
        typer.Option(
            help="Mean cosine of an encoder's embeddings.", rich_help_panel=_THRESHOLDS, show_default=False
        ),
    ] = None,
    min_accuracy_retention: Annotated[
        str | None,
        typer.Option(
            help="The student's metric over the teacher's: 97% or 0.97.",
            rich_help_panel=_THRESHOLDS,
            show_default=False,
        ),
    ] = None,
    min_speedup: Annotated[
        float | None,
        typer.Option(
            help="Throughput over the original's or the teacher's.",
            rich_help_panel=_THRESHOLDS,
            show_default=False,
        ),
    ] = None,
    beat_control: Annotated[
        bool,
        typer.Option(
            "--beat-control",
            help="The student must be better than the control.",
            rich_help_panel=_THRESHOLDS,
        ),
    ] = False,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="All weight files together: 120MB or 120000000.",
            rich_help_panel=_THRESHOLDS,
            show_default=False,
        ),
    ] = None,
    on_inconclusive: Annotated[
        str | None,
        typer.Option(
            help="When a threshold lies inside the 95 % interval: fail (default), pass or warn.",
            rich_help_panel=_THRESHOLDS,
            show_default=False,
        ),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option(help="Write JUnit XML to this file.", rich_help_panel=_OUTPUT, show_default=False),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            help="Append Markdown to this file, as $GITHUB_STEP_SUMMARY.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    annotations: Annotated[
        bool,
        typer.Option(
            "--annotations", help="Print ::error lines for the log of a workflow.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Hold a report to thresholds: exit code 0 when all are met, 3 when not.

    A number that was measured on samples has a 95 % interval, and a threshold is met only when the whole
    interval meets it. A threshold inside the interval is inconclusive: more evaluation data decides.
    """
    from compressor.recipes import build_gate
    from compressor.reports import ci
    from compressor.reports.gates import check_gate, raise_if_failed, sentence
    from compressor.reports.write import read_report

    wanted = build_gate(
        recipe,
        {
            "max_kl": max_kl,
            "max_ppl_increase": max_ppl_increase,
            "min_top1": min_top1,
            "min_cosine": min_cosine,
            "min_accuracy_retention": min_accuracy_retention,
            "min_speedup": min_speedup,
            "beat_control": beat_control or None,
            "max_bytes": max_bytes,
            "on_inconclusive": on_inconclusive,
        },
    )
    found = read_report(report)
    result = check_gate(found, wanted)
    if result is None:
        raise UsageError("no threshold is given: name at least one, such as --max-kl 0.1")
    if junit is not None:
        ci.write_junit(result, found, str(report), junit)
    if summary is not None:
        ci.append_summary(result, found, summary)
    if annotations:
        for line in ci.annotations(result, str(report)):
            typer.echo(line, err=as_json)  # standard output is for the document alone
    if as_json:
        from compressor.cli.documents import Gated, print_document

        print_document(Gated(report=str(report), **dict(result)))
    else:
        table = Table("threshold", "result", "found")
        colours = {"pass": "green", "fail": "red", "inconclusive": "yellow"}
        for one in result.results:
            table.add_row(one.name, f"[{colours[one.outcome]}]{one.outcome}[/]", escape(sentence(one)))
        out.print(table)
    if result.on_inconclusive == "warn":
        for one in result.results:
            if one.outcome == "inconclusive":
                warn(f"{one.name}: {sentence(one)}")
    raise_if_failed(result, f"{report}: the artifact is as it was")
