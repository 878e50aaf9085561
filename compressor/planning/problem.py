"""The allocation problem: pick one choice for each unit, minimise damage, stay within a budget."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from compressor.engines import check as check_engine
from compressor.errors import UsageError
from compressor.formats import parse_format
from compressor.graph import Linear
from compressor.sensitivity.schema import Sensitivity, UnitScores

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """One row of ``names`` for every choice; ``unit_of`` [choices] says whose it is, in ascending order.

    ``cost`` [choices] is what a choice uses of the budget and ``fixed`` what everything else uses. The damage of
    a plan that picks choices c is Σ damage[c] + Σ_{c≠d} cross[c, d] (each pair counted twice, as in cᵀ Q c);
    ``cross`` [choices, choices] is symmetric with zeros within a unit, or None for independent units.
    """

    units: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    unit_of: Integers
    damage: Floats
    cost: Floats
    fixed: float
    cross: Floats | None = None

    def choices(self, unit: int) -> Integers:
        """Indices of a unit's choices."""
        return np.flatnonzero(self.unit_of == unit)

    def damage_of(self, picked: Integers) -> float:
        """The damage of a plan, ``picked`` [units] being one choice index for each unit."""
        total = float(self.damage[picked].sum())
        if self.cross is not None:
            total += float(self.cross[np.ix_(picked, picked)].sum())
        return total

    def cost_of(self, picked: Integers) -> float:
        """What a plan uses of the budget, everything else included."""
        return self.fixed + float(self.cost[picked].sum())

    def plan(self, picked: Integers) -> dict[str, str]:
        """Format by unit name."""
        return dict(self.names[index] for index in picked)


@dataclass(frozen=True)
class Rules:
    """What the user demands: each pattern is a unit or layer name, a glob, or a regular expression after ``re:``.

    ``pins`` fix a format, ``forbids`` exclude one, ``floors`` set the fewest bits per weight, and ``engine`` excludes
    what it cannot load.
    """

    pins: tuple[tuple[str, str], ...] = ()
    forbids: tuple[tuple[str, str], ...] = ()
    floors: tuple[tuple[str, float], ...] = ()
    engine: str | None = None


def parse_rules(
    pins: Sequence[str], forbids: Sequence[str], floors: Sequence[str], engine: str | None = None
) -> Rules:
    """Rules from ``PATTERN=VALUE`` options. Raises UsageError naming the option."""

    def split(option: str, text: str) -> tuple[str, str]:
        pattern, found, value = text.rpartition("=")
        if not found or not pattern or not value:
            raise UsageError(f"{option} {text}: write PATTERN=VALUE, for example '*.down_proj=w8'")
        return pattern, value

    def bits(text: str) -> tuple[str, float]:
        pattern, value = split("--floor", text)
        try:
            return pattern, float(value.removesuffix("bits"))
        except ValueError:
            raise UsageError(f"--floor {text}: {value} is not a number of bits") from None

    def named(option: str, text: str) -> tuple[str, str]:
        pattern, value = split(option, text)
        return pattern, parse_format(value).name

    return Rules(
        tuple(named("--pin", text) for text in pins),
        tuple(named("--forbid", text) for text in forbids),
        tuple(bits(text) for text in floors),
        engine,
    )


def allowed_formats(scan: Sensitivity, rules: Rules) -> dict[str, list[str]]:
    """The formats that each unit may have, in the scan's order.

    Raises UsageError for a rule that matches nothing, pins that contradict each other, a format that was
    not scanned, and a unit that is left without a format.
    """
    allowed = {
        unit.name: [name for name in unit.formats if not _problem(unit, name, rules.engine)]
        for unit in scan.units
    }
    pinned: dict[str, tuple[str, str]] = {}
    for pattern, name in rules.pins:
        for unit in _matching(scan, "--pin", pattern):
            if name not in unit.formats:
                raise UsageError(
                    f"--pin {pattern}={name}: {unit.name} was scanned in {', '.join(unit.formats)}: scan again with {name}"
                )
            if unit.name in pinned and pinned[unit.name][1] != name:
                other = "=".join(pinned[unit.name])
                raise UsageError(f"--pin {pattern}={name}: {unit.name} is already pinned by {other}")
            pinned[unit.name] = (pattern, name)
            if problem := _problem(unit, name, rules.engine):
                raise UsageError(
                    f"--pin {pattern}={name}: {rules.engine} cannot load {name} for {unit.name}: {problem}"
                )
            allowed[unit.name] = [name]
    for pattern, name in rules.forbids:
        for unit in _matching(scan, "--forbid", pattern):
            allowed[unit.name] = [f for f in allowed[unit.name] if f != name]
    for pattern, floor in rules.floors:
        for unit in _matching(scan, "--floor", pattern):
            allowed[unit.name] = [f for f in allowed[unit.name] if parse_format(f).bits >= floor]
    for unit_name, left in allowed.items():
        if not left:
            raise UsageError(
                f"{unit_name}: the pins, forbids and floors leave it no format: relax one of them"
            )
    return allowed


def _problem(unit: UnitScores, name: str, engine: str | None) -> str:
    """Why ``engine`` cannot load the unit in this format; empty if it can."""
    if engine is None:
        return ""
    form: Literal["linear", "expert"] = "expert" if unit.kind == "experts" else "linear"
    layers = [Linear(layer.name, layer.out_features, layer.in_features, False, form) for layer in unit.layers]
    problems = check_engine(engine, layers, parse_format(name))
    return problems[0].reason if problems else ""


def _matching(scan: Sensitivity, option: str, pattern: str) -> list[UnitScores]:
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise UsageError(f"{option} {pattern}: not a regular expression ({error})") from None

        def hit(name: str) -> bool:
            return expression.search(name) is not None
    else:

        def hit(name: str) -> bool:
            return name == pattern or fnmatch.fnmatchcase(name, pattern)

    found = [unit for unit in scan.units if hit(unit.name) or any(hit(layer.name) for layer in unit.layers)]
    if not found:
        example = scan.units[0].name
        raise UsageError(f"{option} {pattern}: matches no unit of the scan; names look like {example}")
    return found
