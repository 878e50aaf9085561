"""What a distillation found out, as the report's section."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from compressor.distillation.fused import Objective
from compressor.distillation.latency import Latency, speedup
from compressor.distillation.loop import Progress, Training
from compressor.distillation.measure import METRICS, Columns, Measured, difference, primary, quotient
from compressor.distillation.tasks import LANGUAGE_MODELS, Examples, TaskName
from compressor.evaluation.bootstrap import Estimate as Interval
from compressor.recipes import DistillRecipe
from compressor.reports.schema import (
    Distillation,
    DistillationArm,
    DistillationData,
    DistillationPoint,
    Estimate,
    Timing,
)


@dataclass(frozen=True)
class Arm:
    """One of the models that are compared."""

    ref: str
    parameters: int
    bytes: int
    measured: Measured
    latency: Latency | None


@dataclass(frozen=True)
class Distilled:
    """Everything measured: ``arms`` teacher, before, after and perhaps control."""

    task: TaskName
    objective: Objective
    training: Training
    arms: Mapping[str, Arm]
    progress: Progress
    control: Progress | None
    sources: tuple[Examples, Examples, Examples]
    seed: int

    def metric(self, arm: str) -> float:
        """The primary metric of an arm."""
        return self.arms[arm].measured.metrics[primary(self.task)].value

    @property
    def retention(self) -> Interval:
        """How much of the teacher's metric the student has, paired; inverted for metrics where less is better."""
        a, b = self._columns("teacher"), self._columns("after")
        if METRICS[self.task][primary(self.task)].better == "lower":
            a, b = b, a
        return quotient(self.task, a, b, primary(self.task), seed=self.seed)

    @property
    def recovery(self) -> float | None:
        """(after − before) ÷ (teacher − before), for perplexity of its logarithm; None if nothing had been lost."""
        before, after, teacher = self.metric("before"), self.metric("after"), self.metric("teacher")
        if primary(self.task) == "perplexity":
            before, after, teacher = (float(np.log(x)) for x in (before, after, teacher))
        lost = teacher - before
        worse_before = lost > 0 if METRICS[self.task][primary(self.task)].better == "higher" else lost < 0
        return (after - before) / lost if worse_before else None

    @property
    def speedup(self) -> Interval | None:
        """Items a second of the student ÷ the teacher's, with an interval from the standard errors of both."""
        teacher, student = self.arms["teacher"].latency, self.arms["after"].latency
        return speedup(teacher, student) if teacher and student else None

    def gain(self, over: str) -> Interval:
        """after − ``over`` in the primary metric, paired; turned so that more is better."""
        a, b = self._columns(over), self._columns("after")
        if METRICS[self.task][primary(self.task)].better == "lower":
            a, b = b, a
        return difference(self.task, a, b, primary(self.task), seed=self.seed)

    def _columns(self, arm: str) -> Columns:
        return self.arms[arm].measured.columns

    @property
    def warnings(self) -> list[str]:
        """What a reader should not overlook."""
        found = []
        if self.progress.best_step == 0:
            found.append(
                "training never beat the student it began with: lower the learning rate or give more data"
            )
        if self.gain("before").value < 0:
            found.append("the student is worse on the test data than before it was trained")
        if self.control is not None:
            gain = self.gain("control")
            if gain.value <= 0:
                found.append(
                    "distillation bought nothing: the control, trained on the labels alone, is as good"
                )
            elif gain.low is not None and gain.low <= 0:
                found.append("the gain over the control is within the noise of the test data")
        return found


def chosen_by(task: TaskName, settings: DistillRecipe, objective: Objective) -> str:
    """The metric by which the best student is chosen: the task's, or for one that is to be its original again, where
    knowing the labels better is no merit, the divergence from it."""
    recovered = (settings.student or "").startswith("quantized:") and objective.alpha > 0
    return "kl" if recovered else primary(task)


def report_section(distilled: Distilled, settings: DistillRecipe) -> Distillation:
    """The section of the report."""
    name = primary(distilled.task)
    gain = None if distilled.control is None else _estimate(distilled.gain("control"))
    return Distillation(
        task=distilled.task,
        metric=name,
        better=METRICS[distilled.task][name].better,
        loss=describe(distilled, settings),
        arms={arm: _arm(content) for arm, content in distilled.arms.items()},
        retention=_known(distilled.retention),
        recovery=distilled.recovery,
        speedup=None if distilled.speedup is None else _estimate(distilled.speedup),
        gain_over_control=gain,
        steps=distilled.progress.step,
        best_step=distilled.progress.best_step,
        rows=distilled.progress.rows,
        training_seconds=distilled.progress.seconds,
        curve_metric=chosen_by(distilled.task, settings, distilled.objective),
        curve=_curve(distilled.progress),
        control_curve=[] if distilled.control is None else _curve(distilled.control),
        data={
            part: DistillationData(source=e.source, examples=len(e), truncated=e.truncated, sha256=e.sha256)
            for part, e in zip(("training", "evaluation", "test"), distilled.sources, strict=True)
        },
    )


def describe(distilled: Distilled, settings: DistillRecipe) -> str:
    """The loss in words that another lab could repeat."""
    objective = distilled.objective
    row = "token" if distilled.task in LANGUAGE_MODELS else "row"
    parts = [
        f"{objective.alpha:g} × T² × {objective.kind} at T={objective.temperature:g}",
        f"{1 - objective.alpha:g} × cross-entropy",
    ]
    if settings.hidden:
        parts.append(f"{settings.hidden:g} × hidden MSE per real token")
    if settings.relations:
        parts.append(f"{settings.relations:g} × relation KL per real token")
    return f"{' + '.join(parts)}; sums over supervised {row}s ÷ their number in the step; {distilled.progress.rows:,} {row}s in all"


def _arm(arm: Arm) -> DistillationArm:
    metrics = {
        name: estimate
        for name, interval in arm.measured.metrics.items()
        if np.isfinite(interval.value) and (estimate := _estimate(interval)) is not None
    }
    timing = None if arm.latency is None else Timing.model_validate(asdict(arm.latency))
    return DistillationArm(
        ref=arm.ref, parameters=arm.parameters, bytes=arm.bytes, metrics=metrics, latency=timing
    )


def _estimate(interval: Interval) -> Estimate:
    ends = [x if x is not None and np.isfinite(x) else None for x in (interval.low, interval.high)]
    return Estimate(value=interval.value, low=ends[0], high=ends[1])


def _known(interval: Interval) -> Estimate | None:
    return _estimate(interval) if np.isfinite(interval.value) else None


def _curve(progress: Progress) -> list[DistillationPoint]:
    return [
        DistillationPoint.model_validate({k: v for k, v in asdict(p).items() if v is None or np.isfinite(v)})
        for p in progress.curve
    ]
