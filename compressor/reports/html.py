"""A report as one HTML file: no network, no scripts, readable on a phone, in the dark and on paper."""

from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from compressor.reports import plots, speed_wording, wording
from compressor.reports.gates import sentence
from compressor.reports.schema import Report

_LAYER_ROWS = 1500  # of the full table; keeps the page of a model with thousands of modules small


@dataclass(frozen=True)
class Tile:
    """One number of the page's head: what, how much, and what that is compared with."""

    label: str
    value: str
    detail: str


def render_html(report: Report) -> str:
    """The page. Text from outside is escaped; drawings are SVG inside it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("compressor.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        maybe=lambda value: "–" if value is None else wording.number(value),
        number=wording.number,
        percent=wording.percent,
        estimate=wording.estimate,
        change=wording.change,
        size=wording.size,
        duration=wording.duration,
    )
    layers = report.quantization.layers if report.quantization else []
    return environment.get_template("report.html.j2").render(
        report=report,
        title=title(report),
        state=state(report),
        verdict=verdict(report),
        tiles=tiles(report),
        gate_sentence=sentence,
        metric_label=wording.label,
        distillation_header=wording.distillation_header,
        distillation_rows=wording.distillation_rows,
        speed_header=speed_wording.speed_header,
        speed_rows=speed_wording.speed_rows,
        speed_facts=speed_wording.speed_facts,
        drawings={
            name: Markup(draw(report))  # made here, of numbers and escaped labels
            for name, draw in (
                ("sensitivity", plots.sensitivity),
                ("bits", plots.bits),
                ("errors", plots.layer_errors),
                ("pareto", plots.pareto),
                ("predicted", plots.predicted_measured),
                ("curve", plots.learning_curve),
            )
        },
        worst=wording.worst_layers(layers, 10),
        row_limit=_LAYER_ROWS,
    )


def title(report: Report) -> str:
    """The model's own name: the last part of the reference."""
    model = report.source or report.artifact
    asked = report.tool.arguments.get("model")  # a recipe's: what is measured may be a student of it
    ref = str(asked) if asked else model.ref if model else "report"
    return f"{ref.rstrip('/').rsplit('/', 1)[-1]}: compressor {report.tool.command}"


def state(report: Report) -> str:
    """``bad``, ``warn``, ``good`` or, where nothing was checked, ``plain``."""
    if (report.verification and not report.verification.passed) or (report.gate and not report.gate.passed):
        return "bad"
    if report.gate and any(result.outcome != "pass" for result in report.gate.results):
        return "warn"
    return "good" if report.verification or report.gate else "plain"


def verdict(report: Report) -> str:
    """The first thing to know, in a few words."""
    parts = []
    if report.verification:
        failed = [check for check in report.verification.checks if not check.passed]
        count = len(report.verification.checks)
        parts.append(f"Verified: all {count} checks passed" if not failed else f"Verification failed: {len(failed)} of {count} checks")  # fmt: skip
    if report.gate:
        missed = [result for result in report.gate.results if result.outcome != "pass"]
        count = len(report.gate.results)
        if not report.gate.passed:
            parts.append(f"gate failed: {len(missed)} of {count} thresholds not met")
        else:
            parts.append("gate passed" + (f", {len(missed)} of {count} not decided" if missed else ""))
    text = "; ".join(parts) or "Measured; nothing was asked to be verified"
    return text[0].upper() + text[1:]


def tiles(report: Report) -> list[Tile]:
    """Size, quality and speed against the baseline."""
    found = []
    source, artifact = report.source, report.artifact
    if artifact and source and artifact.bytes:
        found.append(Tile("Size", f"÷{source.bytes / artifact.bytes:.2f}", f"{wording.size(source.bytes)} → {wording.size(artifact.bytes)}, {artifact.bits_per_weight:.2f} bits a weight"))  # fmt: skip
    elif artifact:
        found.append(
            Tile("Size", wording.size(artifact.bytes), f"{artifact.bits_per_weight:.2f} bits a weight")
        )
    metrics = report.evaluation.metrics if report.evaluation else {}
    for name, metric in metrics.items():
        if name == "nll":
            continue
        unit = metric.unit
        value = metric.compressed
        if metric.ratio and metric.baseline:
            shown = wording.percent(metric.ratio.value - 1, sign=True)
            detail = f"{wording.number(metric.baseline.value)} → {wording.number(value.value)}"
            if metric.ratio.low is not None and metric.ratio.high is not None:
                low, high = (wording.percent(x - 1, sign=True) for x in (metric.ratio.low, metric.ratio.high))
                detail += f"; 95 %: {low} to {high}"
        else:
            shown = wording.percent(value.value) if unit == "fraction" else wording.number(value.value)
            detail = "; ".join(filter(None, ["" if unit == "fraction" else unit, wording.ends(value, unit)]))
        name = wording.LABELS.get(name, name)
        found.append(Tile(name[0].upper() + name[1:], shown, detail))
    speedup = report.speed and (report.speed.decode_speedup or report.speed.prefill_speedup)
    if speedup:
        part = "decoding" if report.speed and report.speed.decode_speedup else "a forward pass"
        found.append(Tile("Speed", f"{speedup.value:.2f}×", "; ".join(filter(None, [f"the original's in {part}", wording.ends(speedup)]))))  # fmt: skip
    distillation = report.distillation
    if distillation:
        if distillation.retention is not None:
            found.append(Tile(f"Retained {distillation.metric}", wording.percent(distillation.retention.value), wording.ends(distillation.retention, "fraction") + " of the teacher's"))  # fmt: skip
        if distillation.recovery is not None:
            found.append(Tile("Recovered", wording.percent(distillation.recovery), "of what deriving the student had cost"))  # fmt: skip
        if distillation.speedup is not None:
            found.append(Tile("Throughput", f"{distillation.speedup.value:.2f}×", f"{wording.ends(distillation.speedup)} of the teacher's".strip()))  # fmt: skip
    return found
