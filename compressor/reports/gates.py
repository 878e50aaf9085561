"""Thresholds on a report: passed, failed, or not decided by the data.

A measured number comes with a 95 % interval. A threshold outside of it is decided; one inside it, or on a
number of one sequence, is inconclusive, and ``on_inconclusive`` says what that is worth. Sizes are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from compressor.errors import GateFailed, UsageError
from compressor.recipes import GateRecipe, Recipe
from compressor.reports import wording
from compressor.reports.schema import Estimate, Gate, GateResult, Report
from compressor.reports.speed_wording import leak_line

Outcome = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True)
class _Quantity:
    """A number that can be asked for: the ``key`` of its threshold, and where a report has it."""

    key: str
    label: str
    limit: Literal["max", "min"]
    unit: str
    find: Callable[[Report], Estimate | None]
    needs: str
    exact: bool = False
    strict: bool = False


def _metric(name: str) -> Callable[[Report], Estimate | None]:
    def find(report: Report) -> Estimate | None:
        metric = report.evaluation.metrics.get(name) if report.evaluation else None
        return metric.compressed if metric else None

    return find


def _perplexity_increase(report: Report) -> Estimate | None:
    metric = report.evaluation.metrics.get("perplexity") if report.evaluation else None
    if metric is None or metric.ratio is None:
        return None
    ratio = metric.ratio
    return Estimate(
        value=ratio.value - 1,
        low=None if ratio.low is None else ratio.low - 1,
        high=None if ratio.high is None else ratio.high - 1,
    )


def _speedup(report: Report) -> Estimate | None:
    """Of generation where that was timed, else of the forward pass."""
    if report.speed is not None:
        return report.speed.decode_speedup or report.speed.prefill_speedup
    return report.distillation.speedup if report.distillation else None


_BASELINE = "evaluate a language model with --baseline"
_QUANTITIES = (
    _Quantity("max_kl", "KL(original ‖ compressed)", "max", "nats/token", _metric("kl"), _BASELINE),
    _Quantity("max_ppl_increase", "perplexity increase", "max", "fraction", _perplexity_increase, _BASELINE),
    _Quantity("min_top1", "top-1 agreement", "min", "fraction", _metric("top1_agreement"), _BASELINE),
    _Quantity(
        "min_cosine",
        "cosine of embeddings",
        "min",
        "",
        _metric("cosine"),
        "evaluate an encoder with --baseline",
    ),
    _Quantity(
        "min_accuracy_retention",
        "retention of the teacher's metric",
        "min",
        "fraction",
        lambda report: report.distillation.retention if report.distillation else None,
        "it is in reports of a distillation",
    ),
    _Quantity(
        "min_speedup",
        "speed-up over the original",
        "min",
        "×",
        _speedup,
        "evaluate --latency with --baseline, or distill",
    ),
    _Quantity(
        "beat_control",
        "gain over the control",
        "min",
        "",
        lambda report: report.distillation.gain_over_control if report.distillation else None,
        "distill with --control",
        strict=True,
    ),
    _Quantity(
        "max_bytes",
        "weight files",
        "max",
        "bytes",
        lambda report: Estimate(value=report.artifact.bytes) if report.artifact else None,
        "the report is about no checkpoint",
        exact=True,
    ),
)
_OF_DISTILLATION = {"min_accuracy_retention", "min_speedup", "beat_control"}


def thresholds(wanted: GateRecipe) -> dict[str, float]:
    """What was asked for, by key; to beat the control is to gain more than nothing."""
    asked = wanted.model_dump(exclude={"on_inconclusive", "beat_control"}, exclude_none=True)
    return {**asked, **({"beat_control": 0.0} if wanted.beat_control else {})}


def of_distillation(recipe: Recipe) -> GateRecipe:
    """The part of the recipe's gate that a student can be held to before anything else is made of it."""
    held = _OF_DISTILLATION - ({"min_speedup"} if _is_timed(recipe) else set())
    others = {key: None for key in thresholds(recipe.gate) if key not in held}
    return recipe.gate.model_copy(update=others)


def _is_timed(recipe: Recipe) -> bool:
    return recipe.evaluate is not None and recipe.evaluate.latency is not None


def check_measured(recipe: Recipe) -> None:
    """Raise UsageError, before any work, for a threshold on a number that ``recipe`` never measures."""
    for key in thresholds(recipe.gate):
        if key == "min_speedup" and _is_timed(recipe):
            continue
        if key in _OF_DISTILLATION:
            if recipe.distill is None and key == "min_speedup":
                raise UsageError("gate.min_speedup: nothing is timed: give the recipe evaluate.latency: {}")
            if recipe.distill is None:
                raise UsageError(f"gate.{key}: the recipe has no distill section, so nothing to hold to it")
            if key == "beat_control" and not recipe.distill.control:
                raise UsageError("--beat-control needs --control (gate.beat_control, distill.control)")
        elif key != "max_bytes" and recipe.evaluate is None:
            raise UsageError(f"gate.{key}: the recipe has no evaluate section, so it would not be measured")


def check_gate(report: Report, wanted: GateRecipe) -> Gate | None:
    """Compare ``report`` with what is asked for; None when nothing is.

    Raises UsageError naming a threshold on a number that the report does not have.
    """
    asked = thresholds(wanted)
    results = []
    for quantity in _QUANTITIES:
        if quantity.key not in asked:
            continue
        value = quantity.find(report)
        if value is None:
            raise UsageError(f"{quantity.key}: the report has no {quantity.label}: {quantity.needs}")
        threshold = asked[quantity.key]
        results.append(
            GateResult(
                name=quantity.key,
                label=quantity.label,
                unit=quantity.unit,
                limit=quantity.limit,
                threshold=threshold,
                value=value,
                exact=quantity.exact,
                outcome=outcome(
                    value, threshold, quantity.limit, exact=quantity.exact, strict=quantity.strict
                ),
            )
        )
    if not results:
        return None
    bad = {"fail"} | ({"inconclusive"} if wanted.on_inconclusive == "fail" else set())
    return Gate(
        passed=all(result.outcome not in bad for result in results),
        on_inconclusive=wanted.on_inconclusive,
        results=results,
    )


def outcome(
    value: Estimate,
    threshold: float,
    limit: Literal["max", "min"],
    *,
    exact: bool = False,
    strict: bool = False,
) -> Outcome:
    """Whether the whole interval of ``value`` is on the right side of ``threshold``, on the wrong one, or on both.

    With a maximum of 0.10: [0.07, 0.09] passes, [0.11, 0.13] fails, [0.09, 0.11] is inconclusive. The right side
    includes the threshold itself, unless ``strict``.
    """
    low, high = (value.value, value.value) if exact else (value.low, value.high)
    if low is None or high is None:
        return "inconclusive"
    if limit == "min":
        low, high, threshold = -high, -low, -threshold
    if high < threshold or (high == threshold and not strict):
        return "pass"
    return "fail" if low > threshold else "inconclusive"


def sentence(result: GateResult) -> str:
    """``KL(original ‖ compressed) is 0.0871 [0.083, 0.091] nats/token, at most 0.05 is asked for``."""
    value, threshold = (shown(result, part) for part in (result.value, Estimate(value=result.threshold)))
    bound = {"max": "at most", "min": "at least"}[result.limit]
    if result.name == "beat_control":
        bound = "more than"
    text = f"{result.label} is {value}, {bound} {threshold} is asked for"
    if result.outcome == "inconclusive":
        reason = (
            "it has no interval" if result.value.low is None else "the threshold lies inside the interval"
        )
        return f"{text}: {reason}, so more data must decide"
    return text


def shown(result: GateResult, value: Estimate) -> str:
    """``value`` in the unit of ``result``."""
    if result.unit == "bytes":
        return f"{wording.size(value.value)} ({value.value:,.0f} bytes)"
    unit = "" if result.unit in ("", "fraction") else result.unit if result.unit == "×" else f" {result.unit}"
    return f"{wording.estimate(value, result.unit)}{unit}"


def blocking(gate: Gate) -> list[GateResult]:
    """The results that make the gate fail."""
    bad = {"fail"} | ({"inconclusive"} if gate.on_inconclusive == "fail" else set())
    return [result for result in gate.results if result.outcome in bad]


def raise_if_leaking(report: Report) -> None:
    """Raise GateFailed naming the first model whose memory grows for certain from one inference to the next."""
    for name, arm in report.speed.arms.items() if report.speed else ():
        model = report.source if name == "baseline" else report.artifact
        for found in arm.growth:
            if found.leak:
                raise GateFailed(f"{model.ref if model else 'model'}: {leak_line(name, found)}")


def raise_if_failed(gate: Gate | None, where: str) -> None:
    """Raise GateFailed naming every threshold that was not met; ``where`` says what is kept and where to look."""
    if gate is not None and not gate.passed:
        found = "; ".join(f"{result.name}: {sentence(result)}" for result in blocking(gate))
        raise GateFailed(f"gate failed: {found} ({where})")
