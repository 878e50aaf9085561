"""A plan from a scan: allocate, and if asked to, measure whole plans and let them correct the prediction."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from compressor.console import warn
from compressor.errors import UsageError
from compressor.planning.budget import Budget, parse_budget
from compressor.planning.build import Allocation, allocate, build_problem, frontier, to_plan
from compressor.planning.calibrate import Calibration, fit
from compressor.planning.latency import CostTable, gpu_costs, read_costs
from compressor.planning.measure import (
    MeasureSettings,
    Replaced,
    measure_broken,
    measure_points,
    open_job,
    predicted_damage,
    spread_out,
)
from compressor.planning.problem import Problem, parse_rules
from compressor.plans import Plan
from compressor.sensitivity.schema import Sensitivity

CURVE_POINTS = 24


@dataclass(frozen=True)
class PlanSettings:
    """``costs`` or ``gpu`` serve a latency budget; ``measure`` is the number of whole plans to measure."""

    budget: str
    pins: Sequence[str] = ()
    forbids: Sequence[str] = ()
    floors: Sequence[str] = ()
    engine: str | None = None
    interactions: bool = True
    costs: Path | None = None
    gpu: str | None = None
    batch_tokens: int = 1
    measure: int = 0
    measurement: MeasureSettings = field(default_factory=MeasureSettings)
    seed: int = 0


@dataclass(frozen=True)
class Made:
    """``predicted_kl`` is calibrated if plans were measured; None for scores that are not in nats."""

    plan: Plan
    allocation: Allocation
    predicted_kl: float | None
    calibration: Calibration | None
    problem: Problem
    budget: Budget


def make_plan(scan: Sensitivity, settings: PlanSettings, device: Callable[[], torch.device]) -> Made:
    """Solve and perhaps measure; ``device`` is asked for only then.

    Raises UsageError for rules or budgets that cannot be served, InputRefused when a model that is to be measured has
    changed since its scan.
    """
    if settings.measure and scan.score == "output-mse":
        raise UsageError(
            "output errors are not in nats, so --measure cannot calibrate them: scan again with --score fisher"
        )
    budget = parse_budget(settings.budget, scan)
    rules = parse_rules(settings.pins, settings.forbids, settings.floors, settings.engine)
    table = _cost_table(settings)

    def problem_with(replaced: Replaced) -> Problem:
        return build_problem(
            scan, budget, rules, table=table, interactions=settings.interactions, replaced=replaced
        )

    problem = problem_with({})
    made = allocate(scan, problem, budget, seed=settings.seed)
    calibration: Calibration | None = None
    if settings.measure:
        calibration, replaced = _calibrated(scan, problem, settings, device())
        if replaced:
            problem = problem_with(replaced)
            made = allocate(scan, problem, budget, seed=settings.seed)
    predicted = None
    if scan.score != "output-mse":
        predicted = calibration(made.damage) if calibration else made.damage
    rounded = None if predicted is None else float(f"{predicted:.4g}")
    plan = to_plan(scan, made, predicted_kl=rounded, budget=budget)
    return Made(plan, made, predicted, calibration, problem, budget)


def _calibrated(
    scan: Sensitivity, problem: Problem, settings: PlanSettings, device: torch.device
) -> tuple[Calibration, Replaced]:
    job = open_job(scan, settings.measurement, device)
    plans = spread_out(frontier(scan, problem, CURVE_POINTS, seed=settings.seed), settings.measure)
    calibration = fit(measure_points(scan, job, plans, {}, settings.interactions))
    if not calibration.broken:
        return calibration, {}
    with tempfile.TemporaryDirectory(prefix="compressor-") as work:
        replaced = measure_broken(scan, job, calibration, plans, Path(work))
    calibration = fit(
        [
            replace(point, predicted=predicted_damage(scan, plan.formats, replaced, settings.interactions))
            for point, plan in zip(calibration.points, plans, strict=True)
        ]
    )
    for point in calibration.broken:
        warn(
            f"at {point.bits:.2f} bits the prediction is off by {100 * calibration.error(point):+.0f} % even so: "
            "measure a plan there before trusting it"
        )
    return calibration, replaced


def _cost_table(settings: PlanSettings) -> CostTable | None:
    if settings.costs is not None and settings.gpu is not None:
        raise UsageError("--costs and --gpu exclude each other: give one of them")
    if settings.costs is not None:
        return read_costs(settings.costs)
    return gpu_costs(settings.gpu, settings.batch_tokens) if settings.gpu is not None else None
