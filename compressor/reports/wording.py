"""How numbers and verdicts read, the same on the terminal and in Markdown."""

from compressor.reports.schema import Distillation, Estimate, Layer, Metric, Report

LABELS = {
    "perplexity": "perplexity",
    "nll": "negative log-likelihood",
    "kl": "KL(original ‖ compressed)",
    "top1_agreement": "top-1 agreement",
    "cosine": "cosine of embeddings",
    "neighbour_agreement": "same nearest neighbour",
}


def number(value: float, *, sign: bool = False) -> str:
    """Four significant digits: 26.21, 0.08713, 12,345, 1.5e-05."""
    plus = "+" if sign else ""
    if abs(value) >= 1000:
        return f"{value:{plus},.0f}"
    if value == 0:
        return "0"
    return f"{value:{plus}#.4g}".rstrip(".") if abs(value) >= 1e-4 else f"{value:{plus}.1e}"


def percent(value: float, *, sign: bool = False) -> str:
    return f"{100 * value:{'+' if sign else ''}.1f} %"


def estimate(value: Estimate | None, unit: str = "", *, sign: bool = False) -> str:
    """``26.21 [25.93, 26.50]``, or percentages for fractions; ``–`` for what was not measured."""
    if value is None:
        return "–"

    def show(x: float) -> str:
        return percent(x, sign=sign) if unit == "fraction" else number(x, sign=sign)

    if value.low is None or value.high is None:
        return show(value.value)
    return f"{show(value.value)} [{show(value.low)}, {show(value.high)}]"


def ends(value: Estimate, unit: str = "") -> str:
    """``95 %: 0.083 to 0.091``, or nothing without an interval."""
    if value.low is None or value.high is None:
        return ""
    low, high = (percent(x) if unit == "fraction" else number(x) for x in (value.low, value.high))
    return f"95 %: {low} to {high}"


def change(metric: Metric) -> str:
    """The paired change: in percent of the baseline where there is a ratio, else in the metric's unit."""
    if metric.ratio is None:
        return estimate(metric.change, metric.unit, sign=True)
    ratio = metric.ratio
    relative = Estimate(
        value=ratio.value - 1,
        low=None if ratio.low is None else ratio.low - 1,
        high=None if ratio.high is None else ratio.high - 1,
    )
    return estimate(relative, "fraction", sign=True)


def label(name: str, metric: Metric) -> str:
    unit = f", {metric.unit}" if metric.unit not in ("", "fraction") else ""
    return LABELS.get(name, name) + unit


def size(count: float) -> str:
    """Bytes in decimal units: 158.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """``12.3 s``, ``4 min 05 s`` or ``2 h 03 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def headline(report: Report) -> str:
    """The verdict in one line: verified or not, how much smaller, how much worse."""
    parts = []
    if report.gate is not None:
        missed = [result.name for result in report.gate.results if result.outcome != "pass"]
        parts.append("Gate passed" if report.gate.passed else f"GATE FAILED ({', '.join(missed)})")
    if report.verification is not None:
        failed = [check.name for check in report.verification.checks if not check.passed]
        if report.verification.passed:
            parts.append(f"Verified (checks: {len(report.verification.checks)})")
        else:
            parts.append(f"VERIFICATION FAILED ({', '.join(failed) or 'see checks'})")
    if report.artifact is not None:
        artifact = report.artifact
        text = f"{size(artifact.bytes)}, {artifact.bits_per_weight:.2f} bits/weight"
        if report.source is not None and report.source.bytes > artifact.bytes > 0:
            text = (
                f"{report.source.bytes / artifact.bytes:.2f}× smaller ({size(report.source.bytes)} → {text})"
            )
        parts.append(text)
    if report.distillation is not None:
        parts.append(distillation_verdict(report.distillation))
    metrics = report.evaluation.metrics if report.evaluation else {}
    if "kl" in metrics:
        parts.append(f"KL {estimate(metrics['kl'].compressed)} nats/token")
    if "perplexity" in metrics:
        perplexity = metrics["perplexity"]
        text = f"perplexity {estimate(perplexity.compressed)}"
        if perplexity.baseline and perplexity.ratio:
            ends = f"{number(perplexity.baseline.value)} → {number(perplexity.compressed.value)}"
            text = f"perplexity {ends} ({change(perplexity)})"
        parts.append(text)
    for name in ("top1_agreement", "cosine", "neighbour_agreement"):
        if name in metrics:
            parts.append(f"{LABELS[name]} {estimate(metrics[name].compressed, metrics[name].unit)}")
    return " · ".join(parts) or f"compressor {report.tool.command}: nothing was measured"


ARMS = {
    "teacher": "teacher",
    "before": "student before",
    "after": "student",
    "control": "control (labels only)",
}


def distillation_verdict(found: Distillation) -> str:
    """Retention, recovery, speed and what the teacher was worth, in one line."""
    parts = []
    if found.retention is not None:
        parts.append(f"{estimate(found.retention, 'fraction')} of the teacher's {found.metric}")
    if found.recovery is not None:
        parts.append(f"{percent(found.recovery)} of the loss recovered")
    if found.speedup is not None:
        parts.append(f"{estimate(found.speedup)}× its throughput")
    if found.gain_over_control is not None:
        parts.append(f"{estimate(found.gain_over_control, sign=True)} {found.metric} over the control")
    return " · ".join(parts)


def distillation_rows(found: Distillation) -> list[list[str]]:
    """The arms as rows of text under ``distillation_header``."""
    names = distillation_metrics(found)
    rows = []
    for arm, content in found.arms.items():
        timing = content.latency
        rows.append(
            [
                ARMS.get(arm, arm),
                *(estimate(content.metrics.get(name)) for name in names),
                f"{content.parameters:,}",
                size(content.bytes),
                f"{timing.p50_ms:.1f} / {timing.p95_ms:.1f} ms" if timing else "–",
                f"{timing.items_per_second:.1f}" if timing else "–",
            ]
        )
    return rows


def distillation_metrics(found: Distillation) -> list[str]:
    """Every metric that an arm has, in order."""
    return list(dict.fromkeys(name for arm in found.arms.values() for name in arm.metrics))


def distillation_header(found: Distillation) -> list[str]:
    """Names of the columns of ``distillation_rows``."""
    return ["model", *distillation_metrics(found), "parameters", "weights", "p50 / p95", "items/s"]


def worst_layers(layers: list[Layer], count: int = 5) -> list[Layer]:
    """The layers with the largest remaining error, worst first; those without a measured error are left out."""
    measured = [layer for layer in layers if layer.error_after is not None]
    return sorted(measured, key=lambda layer: (-(layer.error_after or 0.0), layer.module))[:count]
