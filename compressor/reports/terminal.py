"""A report on the terminal, as rich tables."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compressor.console import out
from compressor.reports import wording
from compressor.reports.schema import Distillation, Report, Speed
from compressor.reports.speed_wording import speed_facts, speed_header, speed_rows


def print_report(report: Report, console: Console = out) -> None:
    """Print the verdict, the comparison, the worst layers, failed checks and warnings."""
    console.print(wording.headline(report), style="bold", markup=False, highlight=False)
    if report.distillation:
        console.print(distillation_table(report.distillation))
    if report.evaluation or (report.artifact and not report.distillation):
        console.print(comparison_table(report))
    if report.evaluation:
        console.print(_how(report), style="dim", markup=False, highlight=False)
        for text in report.evaluation.notes:
            console.print(f"note: {text}", markup=False, highlight=False)
    if report.speed:
        console.print(speed_table(report.speed))
        for text in (speed_facts(report.speed), *report.speed.notes):
            console.print(text, style="dim", markup=False, highlight=False)
    if report.quantization and wording.worst_layers(report.quantization.layers):
        console.print(worst_layer_table(report))
    if report.verification:
        for check in report.verification.checks:
            if not check.passed:
                console.print(
                    f"[red]failed[/red] {escape(check.name)}: {escape(check.detail)}", highlight=False
                )
    for warning in report.warnings:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", highlight=False)


def comparison_table(report: Report) -> Table:
    """Baseline, compressed and change of every metric and of the size."""
    table = Table("", "baseline", "compressed", "change")
    for column in table.columns[1:]:
        column.justify = "right"
    if report.evaluation:
        for name, metric in report.evaluation.metrics.items():
            table.add_row(
                wording.label(name, metric),
                *(
                    escape(text.replace(" [", "\n["))
                    for text in (
                        wording.estimate(metric.baseline, metric.unit),
                        wording.estimate(metric.compressed, metric.unit),
                        wording.change(metric),
                    )
                ),
            )
    source, artifact = report.source, report.artifact
    if artifact:
        shrunk = f"÷{source.bytes / artifact.bytes:.2f}" if source and artifact.bytes else "–"
        table.add_row(
            "weight files",
            wording.size(source.bytes) if source else "–",
            wording.size(artifact.bytes),
            shrunk,
        )
        before = f"{source.bits_per_weight:.3f}" if source else "–"
        table.add_row("bits per weight", before, f"{artifact.bits_per_weight:.3f}", "–")
    return table


def distillation_table(found: Distillation) -> Table:
    """Teacher, student before and after, control; one column each, so that it fits a terminal."""
    _, *rows = zip(wording.distillation_header(found), *wording.distillation_rows(found), strict=True)
    arms = [row[0] for row in wording.distillation_rows(found)]
    table = Table("", *arms)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, *cells in rows:
        table.add_row(name, *(escape(text.replace(" [", "\n[")) for text in cells))
    return table


def speed_table(found: Speed) -> Table:
    """Throughput, latency and memory of both models."""
    table = Table(*speed_header())
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in speed_rows(found):
        table.add_row(*(escape(text.replace(" [", "\n[")) for text in cells))
    return table


def worst_layer_table(report: Report) -> Table:
    """The layers with the largest error after rounding."""
    assert report.quantization is not None
    unit = report.quantization.error_unit
    table = Table(
        "layer", "format", "before", "after", "notes", title=f"largest errors{f' ({unit})' if unit else ''}"
    )
    table.columns[0].overflow = "fold"  # names are never cut
    for layer in wording.worst_layers(report.quantization.layers):
        before = "–" if layer.error_before is None else wording.number(layer.error_before)
        after = "–" if layer.error_after is None else wording.number(layer.error_after)
        table.add_row(
            escape(layer.module), layer.format or "–", before, after, escape("; ".join(layer.notes))
        )
    return table


def _how(report: Report) -> str:
    evaluation = report.evaluation
    assert evaluation is not None
    return (
        f"{evaluation.tokens:,} tokens in {evaluation.sequences} sequences of {evaluation.data.source}, "
        f"{evaluation.dtype} on {evaluation.device}, {wording.duration(evaluation.seconds)}; "
        f"brackets are {100 * evaluation.confidence:g} % intervals (paired bootstrap over sequences)"
    )
