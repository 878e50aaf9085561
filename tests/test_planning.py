"""Allocation against brute force, budgets in true bytes, plans that a person edits."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import UsageError
from compressor.formats import parse_format, stored_bytes
from compressor.graph import build_skeleton, discover
from compressor.planning.budget import parse_budget
from compressor.planning.build import allocate, build_problem, frontier, to_plan
from compressor.planning.calibrate import Point, fit
from compressor.planning.check import check_plan
from compressor.planning.latency import GPUS, CostTable, gpu_costs, read_costs, roofline
from compressor.planning.problem import Problem, Rules, parse_rules
from compressor.planning.solve import Infeasible, solve, solve_independent, without_interactions
from compressor.planning.write import plan_yaml, write_plan
from compressor.plans import read_plan
from compressor.sensitivity.schema import FormatScore, Kept, Layer, Sensitivity, UnitScores
from compressor.sources.model import open_model

RULES = Rules()


def random_problem(units: int, formats: int, seed: int, rank: int = 3) -> Problem:
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(units), formats)
    factor = rng.normal(size=(rank, units * formats)) * rng.uniform(0.2, 2, units * formats)
    cross = factor.T @ factor
    damage = np.diag(cross) * rng.uniform(1, 1.5, units * formats)
    cross[owner[:, None] == owner[None, :]] = 0
    cost = rng.integers(1, 30, units * formats).astype(float)
    names = tuple((f"u{i // formats}", f"f{i % formats}") for i in range(units * formats))
    return Problem(tuple(f"u{i}" for i in range(units)), names, owner, damage, cost, 7.0, cross)


def brute_force(problem: Problem, limit: float) -> float:
    options = [problem.choices(unit) for unit in range(len(problem.units))]
    best = np.inf
    for picked in itertools.product(*options):
        array = np.array(picked)
        if problem.cost_of(array) <= limit:
            best = min(best, problem.damage_of(array))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_small_problems_are_solved_exactly(seed: int) -> None:
    problem = random_problem(units=6, formats=3, seed=seed)
    low = problem.fixed + sum(problem.cost[problem.choices(u)].min() for u in range(6))
    for limit in (low, low * 1.3, low * 2):
        assert solve(problem, limit).damage == pytest.approx(brute_force(problem, limit), abs=1e-9)


def test_twelve_units_are_solved_exactly() -> None:
    problem = random_problem(units=12, formats=2, seed=5)
    limit = problem.fixed + 0.5 * sum(problem.cost[problem.choices(u)].sum() for u in range(12))
    assert solve(problem, limit).damage == pytest.approx(brute_force(problem, limit), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 10**6), st.floats(1.0, 2.0))
def test_search_is_never_worse_than_its_start_and_stays_within_budget(
    units: int, formats: int, seed: int, room: float
) -> None:
    problem = random_problem(units, formats, seed)
    low = problem.fixed + sum(problem.cost[problem.choices(u)].min() for u in range(units))
    start = solve_independent(problem, low * room)
    found = solve(problem, low * room)
    assert found.cost <= low * room + 1e-6
    assert found.damage <= start.damage + 1e-9
    assert [problem.unit_of[c] for c in found.picked] == list(range(units))
    independent = without_interactions(problem)
    assert solve(independent, low * room).damage == pytest.approx(
        brute_force(independent, low * room), abs=1e-9
    )


def test_infeasible_budget_names_the_nearest() -> None:
    problem = random_problem(4, 3, 0)
    low = problem.fixed + sum(problem.cost[problem.choices(u)].min() for u in range(4))
    with pytest.raises(Infeasible) as raised:
        solve(problem, low - 1)
    assert raised.value.nearest == low
    assert solve(problem, low).cost == low


def make_scan(model: Path, formats: tuple[str, ...] = ("w4g32", "w8", "bf16")) -> Sensitivity:
    """A scan with made-up damages over a real model's units."""
    skeleton = build_skeleton(open_model(str(model)))
    graph = discover(skeleton)
    item = skeleton.dtype.itemsize
    error = {"w3g32": 0.4, "w4g32": 0.1, "w4g64": 0.15, "w8": 0.001, "w8a8": 0.004, "bf16": 0.0}
    units = []
    for index, unit in enumerate(graph.units):
        scores = {
            name: FormatScore(
                damage=error[name] * (1 + index % 5),
                weight_error=error[name],
                output_error=error[name],
                bytes=sum(
                    stored_bytes(parse_format(name), la.out_features, la.in_features, item)
                    for la in unit.layers
                ),
            )
            for name in formats
        }
        layers = tuple(
            Layer(name=la.name, out_features=la.out_features, in_features=la.in_features)
            for la in unit.layers
        )
        units.append(
            UnitScores(name=unit.name, kind=unit.kind, block=unit.block, layers=layers, formats=scores)
        )
    total = sum(entry.nbytes for entry in skeleton.source.tensors.values())
    kept = {
        name: Kept(
            reason=reason,
            bytes=skeleton.stored[f"{name}.weight"].nbytes if f"{name}.weight" in skeleton.stored else 0,
        )
        for name, reason in graph.kept.items()
    }
    return Sensitivity(
        model=str(model),
        weights_sha256="0",
        score="fisher",
        rounding="rtn",
        engine=None,
        seed=0,
        draws=1,
        sequences_used=1,
        sequence_length=8,
        tokens=7,
        data="made up",
        data_sha256="0",
        device="cpu",
        dtype="float32",
        parameters=sum(unit.numel for unit in graph.units),
        source_bytes=total,
        other_bytes=total - sum(u.formats["bf16"].bytes for u in units) - sum(k.bytes for k in kept.values()),
        formats=formats,
        units=tuple(units),
        kept=kept,
    )


def made(scan: Sensitivity, text: str, rules: Rules = RULES, table: CostTable | None = None):  # type: ignore[no-untyped-def]
    budget = parse_budget(text, scan)
    return allocate(scan, build_problem(scan, budget, rules, table=table), budget), budget


def test_budgets_count_true_bytes(tiny_llama_dir: Path) -> None:
    scan = make_scan(tiny_llama_dir)
    everything, _ = made(scan, "100%")
    assert set(everything.formats.values()) == {"bf16"}
    assert everything.bytes == scan.source_bytes  # a tied embedding is stored, and counted, once
    for text, check in (
        ("6bits", lambda a: a.bits <= 6),
        (f"{scan.source_bytes * 0.5:.0f}b", lambda a: a.bytes <= scan.source_bytes * 0.5),
        ("50%", lambda a: a.bytes <= scan.source_bytes * 0.5),
    ):
        allocation, _ = made(scan, text)
        assert check(allocation)
        assert len(set(allocation.formats.values())) > 1
    smallest = sum(u.formats["w4g32"].bytes for u in scan.units)
    with pytest.raises(UsageError, match=r"nearest feasible budget is 4\.\d+bits") as raised:
        made(scan, "3bits")
    offered = str(raised.value).split("budget is ")[1].split()[0]
    assert float(offered.removesuffix("bits")) == pytest.approx(8 * smallest / scan.parameters, rel=1e-3)
    assert set(made(scan, offered)[0].formats.values()) == {"w4g32"}


@pytest.mark.parametrize("text", ["4.5", "bits", "-3MB", "latency:5", "1e3MB", ""])
def test_budget_syntax_is_checked(tiny_llama_dir: Path, text: str) -> None:
    with pytest.raises(UsageError, match="--budget"):
        parse_budget(text, make_scan(tiny_llama_dir))


def test_rules(tiny_llama_dir: Path) -> None:
    scan = make_scan(tiny_llama_dir)
    rules = parse_rules(["*.down_proj=bf16", "model.layers.0.self_attn.q_proj=w8"], ["re:o_proj$=w4g32"], [])
    allocation, _ = made(scan, "14bits", rules)
    assert allocation.formats["model.layers.1.mlp.down_proj"] == "bf16"
    assert allocation.formats["model.layers.0.self_attn.qkv"] == "w8"  # a layer's name reaches its unit
    assert allocation.formats["model.layers.0.self_attn.o_proj"] != "w4g32"
    floored, _ = made(scan, "9bits", parse_rules([], [], ["*.mlp.*=8"]))
    assert all(f != "w4g32" for name, f in floored.formats.items() if ".mlp." in name)
    for bad, message in (
        ((["nothing=w8"], [], []), "matches no unit"),
        ((["*=w2"], [], []), "scan again"),
        ((["*o_proj=w8", "*.0.*=bf16"], [], []), "already pinned"),
        ((["*o_proj"], [], []), "PATTERN=VALUE"),
        (([], ["*=w4g32", "*=w8", "*=bf16"], []), "no format"),
        (([], [], ["*=few"]), "number of bits"),
    ):
        with pytest.raises(UsageError, match=message):
            made(scan, "9bits", parse_rules(*bad))


def test_frontier_is_monotone(tiny_llama_dir: Path) -> None:
    scan = make_scan(tiny_llama_dir)
    budget = parse_budget("8bits", scan)
    curve = frontier(scan, build_problem(scan, budget, RULES), 7)
    assert len(curve) >= 5
    assert all(a.bytes < b.bytes and a.damage > b.damage for a, b in itertools.pairwise(curve))


def test_plan_is_written_read_and_checked(tiny_llama_dir: Path, tmp_path: Path) -> None:
    scan = make_scan(tiny_llama_dir)
    allocation, budget = made(scan, "6bits")
    plan = to_plan(scan, allocation, predicted_kl=allocation.damage, budget=budget)
    file = tmp_path / "plan.yaml"
    text = plan_yaml(plan, scan, file)
    write_plan(file, text, overwrite=False)
    with pytest.raises(UsageError, match="already exists"):
        write_plan(file, text, overwrite=False)
    assert read_plan(file) == plan
    assert (
        plan_yaml(
            to_plan(scan, made(scan, "6bits")[0], predicted_kl=allocation.damage, budget=budget), scan, file
        )
        == text
    )
    assert sum(a.bytes or 0 for a in plan.layers.values()) + scan.other_bytes == allocation.bytes

    graph = discover(build_skeleton(open_model(str(tiny_llama_dir))))
    check_plan(file, read_plan(file), graph)
    for old, new, message in (
        ("q_proj: {format: ", "q_proj: {format: w4, was: ", "fuse"),
        ("layers.0.self_attn.o_proj:", "layers.9.self_attn.o_proj:", "no such layer"),
        ("lm_head: {format: bf16", "lm_head: {format: w8", "cannot be quantized"),
    ):
        lines = text.splitlines()
        at = next(i for i, line in enumerate(lines) if old in line)
        lines[at] = lines[at].replace(old, new)
        if "was:" in lines[at]:
            lines[at] = lines[at][: lines[at].index(", was:")] + "}"
        edited = tmp_path / "edited.yaml"
        edited.write_text("\n".join(lines), "utf-8")
        with pytest.raises(UsageError, match=message) as raised:
            check_plan(edited, read_plan(edited), graph)
        named = int(str(raised.value).split("line ")[1].split(":")[0])
        assert named in ((at + 1,) if "no such" in message or "cannot" in message else (at + 2, at + 3))


def test_plan_for_another_engine_is_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    scan = make_scan(tiny_llama_dir)
    allocation, budget = made(scan, "9bits")
    file = tmp_path / "plan.yaml"
    file.write_text(
        plan_yaml(to_plan(scan, allocation, predicted_kl=None, budget=budget), scan, file), "utf-8"
    )
    graph = discover(build_skeleton(open_model(str(tiny_llama_dir))))
    with pytest.raises(UsageError, match=r"line \d+: .*vllm-cpu cannot load w8 .*use w8a8"):
        check_plan(file, read_plan(file), graph, "vllm-cpu")


def test_latency_budget(tiny_llama_dir: Path, tmp_path: Path) -> None:
    scan = make_scan(tiny_llama_dir)
    with pytest.raises(UsageError, match="--costs"):
        made(scan, "latency:1ms")
    table = gpu_costs("a100-80gb", tokens=1)
    dense = sum(
        table.seconds(
            sum(la.out_features for la in u.layers), u.layers[0].in_features, "bf16", u.formats["bf16"].bytes
        )
        for u in scan.units
    )
    allocation, _ = made(scan, f"latency:{dense * 0.5 * 1e6:.6f}us", table=table)
    assert len(set(allocation.formats.values())) > 1
    assert allocation.cost <= dense * 0.5 * 1.001
    file = tmp_path / "costs.json"
    file.write_text('{"artifact": "costs", "version": 1, "tokens": 1, "entries": []}', "utf-8")
    with pytest.raises(UsageError, match="no time for"):
        made(scan, "latency:1ms", table=read_costs(file))
    with pytest.raises(UsageError, match="known are"):
        gpu_costs("gtx-1", 1)


def test_roofline_is_bound_by_memory_then_by_arithmetic() -> None:
    gpu = GPUS["h100-sxm"]
    assert roofline(gpu, 4096, 4096, "w4g128", 8_650_752, 1) == pytest.approx(8_650_752 / 3350e9)
    assert roofline(gpu, 4096, 4096, "w4g128", 8_650_752, 8192) == pytest.approx(2 * 8192 * 4096**2 / 989e12)
    assert roofline(gpu, 4096, 4096, "fp8", 16_785_408, 8192) == pytest.approx(2 * 8192 * 4096**2 / 1979e12)


def test_calibration_leaves_slope_one_only_for_evidence() -> None:
    def points(xs: list[float]) -> list[Point]:
        return [Point(4, 1, x, 1.3 * x**1.2, 0.0) for x in xs]

    near, far = fit(points([0.1, 0.15, 0.2])), fit(points([1e-6, 1e-4, 0.01, 1.0]))
    assert 1 < near.slope < 1.03
    assert far.slope == pytest.approx(1.2, abs=0.01)
    assert near(0.15) == pytest.approx(1.3 * 0.15**1.2, rel=0.02)  # the level is fitted all the same
    assert not near.broken
    assert fit(points([0.1])).slope == 1.0
    assert fit([*points([0.1, 0.2, 0.3]), Point(2, 1, 1.0, 13.0, 0.0)]).broken
