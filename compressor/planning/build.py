"""Scan + budget + rules → problem → plan."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from compressor.errors import UsageError
from compressor.formats import DENSE, parse_format, stored_bytes
from compressor.planning.budget import Budget, cost_of, fixed_cost
from compressor.planning.latency import CostTable
from compressor.planning.problem import Floats, Problem, Rules, allowed_formats
from compressor.planning.solve import Infeasible, Solution, cheapest, solve
from compressor.plans import Assignment, Plan
from compressor.sensitivity.interactions import cross_matrix
from compressor.sensitivity.schema import Sensitivity


@dataclass(frozen=True)
class Allocation:
    """A solved budget: format by unit name, its predicted damage, what it uses, and the checkpoint's size."""

    formats: dict[str, str]
    damage: float
    cost: float
    bytes: int
    bits: float


def build_problem(
    scan: Sensitivity,
    budget: Budget,
    rules: Rules,
    *,
    table: CostTable | None = None,
    interactions: bool = False,
    replaced: Mapping[tuple[str, str], float] | None = None,
) -> Problem:
    """The allocation problem. ``replaced`` holds measured damages that stand in for predicted ones.

    Raises UsageError for rules and budgets that the scan cannot serve.
    """
    allowed = allowed_formats(scan, rules)
    names: list[tuple[str, str]] = []
    owner: list[int] = []
    damage: list[float] = []
    cost: list[float] = []
    for index, unit in enumerate(scan.units):
        for name in allowed[unit.name]:
            names.append((unit.name, name))
            owner.append(index)
            damage.append((replaced or {}).get((unit.name, name), unit.formats[name].damage))
            cost.append(cost_of(budget, scan, unit, name, table))
    cross: Floats | None = None
    if interactions and scan.factor:
        cross = cross_matrix(scan, names)
        cross[np.equal.outer(owner, owner)] = 0.0
    return Problem(
        tuple(unit.name for unit in scan.units),
        tuple(names),
        np.array(owner),
        np.array(damage),
        np.array(cost),
        fixed_cost(budget, scan),
        cross,
    )


def allocate(scan: Sensitivity, problem: Problem, budget: Budget, *, seed: int = 0) -> Allocation:
    """Solve. Raises UsageError naming the nearest feasible budget when none fits."""
    try:
        return allocation(scan, problem, solve(problem, budget.limit, seed=seed))
    except Infeasible as error:
        smallest = allocation(scan, problem, cheapest(problem))
        raise UsageError(
            f"--budget {budget.text}: no plan fits; the nearest feasible budget is {budget.show(error.nearest)} "
            f"({smallest.bytes / 1e6:.1f} MB in all): raise it, scan smaller formats, or relax pins and floors"
        ) from None


def allocation(scan: Sensitivity, problem: Problem, solution: Solution) -> Allocation:
    """A solution with its sizes."""
    return described(scan, problem.plan(solution.picked), solution.damage, solution.cost)


def described(scan: Sensitivity, formats: dict[str, str], damage: float, cost: float) -> Allocation:
    in_units = sum(unit.formats[formats[unit.name]].bytes for unit in scan.units)
    rest = scan.other_bytes + sum(layer.bytes for layer in scan.kept.values())
    return Allocation(formats, damage, cost, in_units + rest, 8 * in_units / scan.parameters)


def frontier(scan: Sensitivity, problem: Problem, points: int, *, seed: int = 0) -> list[Allocation]:
    """The Pareto curve: plans at ``points`` budgets, evenly spaced from the smallest possible to the most
    careful one, those that another plan beats in both damage and cost left out."""
    least = cheapest(problem).cost
    careful = [
        min(problem.choices(u), key=lambda c: (problem.damage[c], problem.cost[c]))
        for u in range(len(problem.units))
    ]
    most = problem.cost_of(np.array(careful))
    found: list[Allocation] = []
    for limit in np.linspace(least, most, points):
        candidate = allocation(scan, problem, solve(problem, float(limit) * (1 + 1e-9), seed=seed))
        if not found or candidate.damage < found[-1].damage - 1e-12:
            found.append(candidate)
    return found


def to_plan(scan: Sensitivity, made: Allocation, *, predicted_kl: float | None, budget: Budget) -> Plan:
    """The plan file's content: every layer by name, fused siblings side by side, kept layers last."""
    layers: dict[str, Assignment] = {}
    for unit in scan.units:
        name = made.formats[unit.name]
        fmt = parse_format(name)
        numel = sum(layer.out_features * layer.in_features for layer in unit.layers)
        item = unit.formats[DENSE.name].bytes // numel
        for layer in unit.layers:
            size = stored_bytes(fmt, layer.out_features, layer.in_features, item)
            if unit.kind == "experts":  # all of one size, and their scales may be wider
                size = unit.formats[name].bytes // len(unit.layers)
            layers[layer.name] = Assignment(format=fmt.name, bytes=size)
    for kept_name, kept in scan.kept.items():
        layers[kept_name] = Assignment(format="bf16", bytes=kept.bytes, reason=kept.reason)
    return Plan(
        model=scan.model, layers=layers, budget=budget.text, predicted_kl=predicted_kl, total_bytes=made.bytes
    )
