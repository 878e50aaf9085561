"""Minimise a plan's damage within a budget.

Independent units are a multiple-choice knapsack, solved exactly as an integer program (HiGHS). With
interactions the objective is quadratic; local search starts from that solution, so it is never worse: it
changes one unit, or two units at once, as long as that helps, then kicks a few units at random and tries again.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from compressor.errors import UsageError
from compressor.planning.problem import Floats, Integers, Problem

_KICKS = 40
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Solution:
    """``picked`` [units] choice indices, their damage and what they use of the budget."""

    picked: Integers
    damage: float
    cost: float


def solve(problem: Problem, limit: float, *, seed: int = 0) -> Solution:
    """The best plan that uses at most ``limit``. Raises UsageError naming the nearest feasible budget."""
    smallest = cheapest(problem)
    if smallest.cost > limit * (1 + _TOLERANCE):
        raise Infeasible(limit, smallest.cost)
    start = solve_independent(problem, limit)
    if problem.cross is None:
        return start
    return local_search(problem, limit, start.picked, seed=seed)


class Infeasible(UsageError):
    """No plan fits: ``nearest`` is the smallest budget that one does fit."""

    def __init__(self, limit: float, nearest: float) -> None:
        super().__init__(f"the budget {limit:,.6g} is too small: the nearest feasible one is {nearest:,.6g}")
        self.limit, self.nearest = limit, nearest


def cheapest(problem: Problem) -> Solution:
    """The plan that uses least of the budget; among equals the least damaging."""
    picked = []
    for unit in range(len(problem.units)):
        options = problem.choices(unit)
        order = np.lexsort((problem.damage[options], problem.cost[options]))
        picked.append(options[order[0]])
    return _solution(problem, np.array(picked))


def solve_independent(problem: Problem, limit: float) -> Solution:
    """The exact optimum of Σ damage[c], interactions ignored (but reported in ``damage``).

    ``damage`` and ``cost`` are scaled to similar magnitudes for the solver; its choice is exact to a relative
    gap of 1e-9.
    """
    count = len(problem.names)
    units = len(problem.units)
    one_each = coo_array((np.ones(count), (problem.unit_of, np.arange(count))), shape=(units, count))
    scale = max(float(problem.damage.max()), 1e-300)
    room = limit - problem.fixed
    weights = problem.cost / max(room, 1e-300)
    result = milp(
        problem.damage / scale,
        constraints=[
            LinearConstraint(one_each.tocsr(), 1, 1),
            LinearConstraint(weights[None, :], -np.inf, 1 + _TOLERANCE),
        ],
        integrality=np.ones(count, dtype=np.int64),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-9, "time_limit": 60.0},
    )
    if result.x is None:
        raise Infeasible(limit, cheapest(problem).cost)
    chosen = np.flatnonzero(result.x > 0.5)
    return _solution(problem, chosen[np.argsort(problem.unit_of[chosen], kind="stable")])


def local_search(
    problem: Problem, limit: float, start: Integers, *, seed: int = 0, kicks: int = _KICKS
) -> Solution:
    """Improve ``start`` under the full quadratic objective; the result is never worse. Deterministic in ``seed``."""
    cross = problem.cross if problem.cross is not None else np.zeros((len(problem.names),) * 2)
    room = limit * (1 + _TOLERANCE) - problem.fixed
    options = [problem.choices(unit) for unit in range(len(problem.units))]
    best = _descend(problem, cross, room, start.copy())
    best_damage = problem.damage_of(best)
    rng = np.random.default_rng(seed)
    for _ in range(kicks):
        trial = best.copy()
        for unit in rng.choice(len(options), size=min(len(options), 3 + len(options) // 20), replace=False):
            trial[unit] = rng.choice(options[unit])
        if problem.cost[trial].sum() > room:
            trial = _repair(problem, cross, room, trial)
        trial = _descend(problem, cross, room, trial)
        damage = problem.damage_of(trial)
        if damage < best_damage - 1e-15:
            best, best_damage = trial, damage
    if best_damage > problem.damage_of(start):
        best = start
    return _solution(problem, best)


def _gains(problem: Problem, cross: Floats, picked: Integers) -> Floats:
    """Change of damage when one unit moves to each choice, [choices]."""
    field = problem.damage + 2 * cross[:, picked].sum(1)
    # A choice does not interact with its own unit's present one, as cross is zero within a unit.
    return field - field[picked][problem.unit_of]


def _descend(problem: Problem, cross: Floats, room: float, picked: Integers) -> Integers:
    """Take the best single or double move until none helps."""
    owner = problem.unit_of
    while True:
        gain = _gains(problem, cross, picked)
        extra = problem.cost - problem.cost[picked][owner]
        slack = room - problem.cost[picked].sum()
        single = np.where(extra <= slack, gain, np.inf)
        first = int(np.argmin(single))
        # Moving i → c and j → d together: gains add up, plus what changes between the two.
        among = (
            cross
            - cross[picked][owner]
            - cross[:, picked][:, owner]
            + cross[np.ix_(picked, picked)][owner[:, None], owner[None, :]]
        )
        pair = gain[:, None] + gain[None, :] + 2 * among
        pair[(extra[:, None] + extra[None, :] > slack) | (owner[:, None] == owner[None, :])] = np.inf
        best_pair = int(np.argmin(pair))
        c, d = divmod(best_pair, len(gain))
        if min(single[first], pair[c, d]) >= -1e-14:
            return picked
        if single[first] <= pair[c, d]:
            picked[owner[first]] = first
        else:
            picked[owner[c]], picked[owner[d]] = c, d


def _repair(problem: Problem, cross: Floats, room: float, picked: Integers) -> Integers:
    """Shrink units, least damage for each unit of budget first, until the plan fits."""
    owner = problem.unit_of
    while problem.cost[picked].sum() > room:
        saved = problem.cost[picked][owner] - problem.cost
        gain = _gains(problem, cross, picked)
        price = np.where(saved > 0, gain / np.maximum(saved, 1e-300), np.inf)
        move = int(np.argmin(price))
        picked[owner[move]] = move
    return picked


def _solution(problem: Problem, picked: Integers) -> Solution:
    return Solution(picked, problem.damage_of(picked), problem.cost_of(picked))


def without_interactions(problem: Problem) -> Problem:
    """The same problem with independent units."""
    return replace(problem, cross=None)
