"""How well a scan predicts, and what its plans are worth: the numbers in benchmarks.md.

    python scripts/wikitext.py wiki.valid.tokens valid.txt && python scripts/wikitext.py wiki.test.tokens test.txt
    python scripts/bench_sensitivity.py scan     --model MODEL --calibration valid.txt --work DIR
    python scripts/bench_sensitivity.py time     --model MODEL --calibration valid.txt --work DIR
    python scripts/bench_sensitivity.py truth    --model MODEL --evaluation test.txt   --work DIR
    python scripts/bench_sensitivity.py budgets  --model MODEL --calibration valid.txt --evaluation test.txt --work DIR
    python scripts/bench_sensitivity.py frontier --model MODEL --evaluation test.txt --work DIR
    python scripts/bench_sensitivity.py report   --work DIR

``scan`` scores every unit × format on 32 sequences (``--samples``) × 256 tokens of the calibration text; ``time`` sets its cost against
as many plain forward+backward passes; ``truth`` measures single units and random whole plans on the evaluation
text; ``budgets`` compares allocations at equal bytes (``gradient``, its peer's score, can be run before); ``frontier``
measures plans along the frontier, four of which calibrate the prediction of the others; ``report`` prints the tables. Every measurement is kept in
DIR and not repeated, so a stopped run goes on.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from compressor.checkpoint.compressed_tensors import scale_dtype
from compressor.graph import load
from compressor.planning.budget import parse_budget
from compressor.planning.build import allocate, build_problem, described
from compressor.planning.calibrate import Point, fit
from compressor.planning.problem import Rules
from compressor.rounding.unit import round_unit
from compressor.sensitivity.interactions import cross_matrix
from compressor.sensitivity.journal import Journal
from compressor.sensitivity.measured import last_hidden, measure_plan, measure_units, stream_of
from compressor.sensitivity.probes import scored_positions
from compressor.sensitivity.scan import ScanJob, ScanSettings, prepare, scan
from compressor.sensitivity.schema import Sensitivity, read_sensitivity, write_sensitivity

FORMATS = ("w3g32", "w4g64", "w8", "bf16")
BUDGETS = ("3.75bits", "4bits", "4.25bits", "4.5bits", "5.5bits")
# Plans along the frontier: some calibrate the prediction, as `plan --measure` does, the others are predicted.
FIT_BUDGETS = ("3.75bits", "4.25bits", "5bits", "6.5bits")
HELD_OUT_BUDGETS = (
    "3.85bits",
    "4bits",
    "4.125bits",
    "4.4bits",
    "4.5bits",
    "4.75bits",
    "5.25bits",
    "5.5bits",
    "6bits",
    "7bits",
)
PAIR_UNITS_PER_KIND = 5
PLAN_TOKENS = (16, 256)
RANDOM_PLANS = 12
CPU = torch.device("cpu")


def job_for(args: argparse.Namespace, data: Path, samples: int, length: int) -> ScanJob:
    settings = ScanSettings(
        str(args.model),
        FORMATS,
        data=str(data),
        samples=samples,
        sequence_length=length,
        draws=args.draws,
        memory=args.memory,
    )
    return prepare(settings, CPU)


def run_scan(args: argparse.Namespace) -> None:
    job = job_for(args, args.calibration, args.samples, 256)
    wall, cpu = time.monotonic(), time.process_time()
    result = scan(job, args.work / "sensitivity.json")
    spent = {
        "wall": time.monotonic() - wall,
        "cpu": time.process_time() - cpu,
        "threads": torch.get_num_threads(),
    }
    write_sensitivity(args.work / "sensitivity.json", result)
    save(args.work / "scan_time.json", spent)
    print(spent)


def run_time(args: argparse.Namespace) -> None:
    """Forward and backward of the next-token loss, all parameters, on the same tokens in batches of four."""
    from transformers import AutoModelForCausalLM

    tokens = job_for(args, args.calibration, args.samples, 256).tokens.input_ids
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model(input_ids=tokens[:1], labels=tokens[:1], use_cache=False).loss.backward()
    wall, cpu = time.monotonic(), time.process_time()
    for batch in tokens.split(4):
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    spent = {
        "wall": time.monotonic() - wall,
        "cpu": time.process_time() - cpu,
        "threads": torch.get_num_threads(),
    }
    save(args.work / "plain_time.json", spent)
    print(spent)


def run_truth(args: argparse.Namespace) -> None:
    """Single units on 16 × 128 tokens (restarted from cached block inputs), whole plans on 16 × 256."""
    job = job_for(args, args.evaluation, 16, 128)
    rng = random.Random(1)
    kinds: dict[str, list[str]] = {}
    for unit in job.graph.units:
        kinds.setdefault(unit.kind, []).append(unit.name)
    chosen = sorted(name for names in kinds.values() for name in rng.sample(names, PAIR_UNITS_PER_KIND))
    only = frozenset((name, fmt.name) for name in chosen for fmt in job.formats[name])
    if not (args.work / "pairs.json").exists():
        with Journal(args.work / "pairs.json", {"pairs": sorted(only)}) as journal:
            stream = stream_of(job)
            hidden = torch.stack(all_hidden(job))
            records = measure_units(job, stream, journal, hidden, only)
            tokens = int(scored_positions(job.skeleton, stream).sum())
            journal.remove()
        entries = [e for index in sorted(records) for e in records[index]["candidates"]]
        save(
            args.work / "pairs.json", {"tokens": tokens, "pairs": [[*e["column"], e["kl"]] for e in entries]}
        )
    measure(args, random_plans(job))


def all_hidden(job: ScanJob) -> list[Tensor]:
    from compressor.calibration.stream import advance
    from compressor.graph import unload

    stream, states = stream_of(job), []
    for index, path in enumerate(job.graph.blocks):
        states.append(stream.hidden.clone())
        block = load(job.skeleton, path, dtype=job.dtype, device=job.device)
        advance(stream, block, index)
        unload(block)
    return [*states, stream.hidden]


def random_plans(job: ScanJob) -> dict[str, dict[str, str]]:
    """Uniform plans and random mixtures: each unit draws its format with probabilities drawn for the plan."""
    units = [unit.name for unit in job.graph.units]
    plans = {f"uniform {name}": dict.fromkeys(units, name) for name in FORMATS[:3]}
    rng = random.Random(2)
    for number in range(RANDOM_PLANS):
        weights = [rng.random() ** 2 for _ in FORMATS]
        plans[f"random {number}"] = {unit: rng.choices(FORMATS, weights)[0] for unit in units}
    return plans


def measure(args: argparse.Namespace, plans: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Measured KL of each plan on the evaluation text, those in DIR/plans.json not repeated."""
    file = args.work / "plans.json"
    known: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    job = job_for(args, args.evaluation, *PLAN_TOKENS)
    baseline: Tensor | None = None
    for name, plan in plans.items():
        if name in known and known[name]["plan"] == plan:
            continue
        same = next((k for k in known.values() if k["plan"] == plan), None)
        if same is None:
            baseline = last_hidden(job) if baseline is None else baseline
            kl = measure_plan(job, plan, baseline)
            same = {"plan": plan, "kl": kl, "tokens": PLAN_TOKENS[0] * (PLAN_TOKENS[1] - 1)}
        known[name] = same
        save(file, known)
        print(f"{name}: {sum(same['kl']) / same['tokens']:.4f}", flush=True)
    return known


def run_budgets(args: argparse.Namespace) -> None:
    """Four ways to spend the same bytes, and the uniform plans below them."""
    result = read_sensitivity(args.work / "sensitivity.json")
    gradient = gradient_scores(args)
    by_error = {
        (u.name, name): score.output_error or 0.0 for u in result.units for name, score in u.formats.items()
    }
    units = [unit.name for unit in result.units]
    plans = {f"uniform {name}": dict.fromkeys(units, name) for name in FORMATS[:2]}
    for text in BUDGETS:
        budget = parse_budget(text, result)
        for label, replaced, interactions in (
            ("ours", None, True),
            ("diagonal", None, False),
            ("output mse", by_error, False),
            ("gradient", gradient, False),
        ):
            problem = build_problem(result, budget, Rules(), interactions=interactions, replaced=replaced)
            plans[f"{label} {text}"] = allocate(result, problem, budget).formats
    measure(args, plans)


def run_frontier(args: argparse.Namespace) -> None:
    result = read_sensitivity(args.work / "sensitivity.json")
    plans = {}
    for text in (*FIT_BUDGETS, *HELD_OUT_BUDGETS):
        budget = parse_budget(text, result)
        problem = build_problem(result, budget, Rules(), interactions=True)
        plans[f"ours {text}"] = allocate(result, problem, budget).formats
    measure(args, plans)


def gradient_scores(args: argparse.Namespace) -> dict[tuple[str, str], float]:
    """The score of ModelOpt 0.47's gradient AutoQuantize (``AutoQuantizeGradientSearcher``): Σ (∂L/∂y)² (Δy)² over the
    elements of a layer's output, L the next-token loss on the data's own tokens; here on 16 sequences."""
    file = args.work / "gradient.json"
    if not file.exists():
        job = job_for(args, args.calibration, 16, 256)
        model = load(job.skeleton, "", dtype=torch.float32)
        scores: dict[str, float] = {}
        deltas: dict[str, dict[str, Tensor]] = {}
        for unit in job.graph.units:
            weights = [model.get_submodule(layer.name).weight for layer in unit.layers]
            for fmt in job.formats[unit.name]:
                rounded = round_unit(
                    weights,
                    fmt,
                    None,
                    method="rtn",
                    scales="mse",
                    damping=0.01,
                    scale_dtype=scale_dtype(job.skeleton.dtype),
                )
                for layer, weight, r in zip(unit.layers, weights, rounded, strict=True):
                    deltas.setdefault(layer.name, {})[fmt.name] = (
                        r.weight.dequantize(torch.float32) - weight
                    ).half()
        for batch in job.tokens.input_ids.split(2):
            seen: dict[str, tuple[Tensor, Tensor]] = {}
            hooks = [
                model.get_submodule(name).register_forward_hook(
                    lambda m, a, o, name=name, seen=seen: seen.__setitem__(name, (a[0].detach(), o))
                )
                for name in deltas
            ]
            embedded = model.get_input_embeddings()(batch).requires_grad_(True)
            loss = model(inputs_embeds=embedded, labels=batch, use_cache=False).loss * (
                batch.numel() - len(batch)
            )
            names = list(seen)
            for name, gradient in zip(
                names, torch.autograd.grad(loss, [seen[n][1] for n in names]), strict=True
            ):
                squared = gradient.square()
                for fmt, delta in deltas[name].items():
                    error = torch.nn.functional.linear(seen[name][0], delta.float())
                    key = f"{name}|{fmt}"
                    scores[key] = scores.get(key, 0.0) + float((squared * error.square()).sum())
            for hook in hooks:
                hook.remove()
        by_unit = {
            f"{unit.name}|{fmt.name}": sum(scores[f"{layer.name}|{fmt.name}"] for layer in unit.layers)
            for unit in job.graph.units
            for fmt in job.formats[unit.name]
        }
        save(file, by_unit)
    found = {tuple(key.split("|")): value for key, value in json.loads(file.read_text("utf-8")).items()}
    return {(name, fmt): value for (name, fmt), value in found.items()}


def run_report(args: argparse.Namespace) -> None:
    """Print the table of every step that has been run."""
    result = read_sensitivity(args.work / "sensitivity.json")
    ours, plain = args.work / "scan_time.json", args.work / "plain_time.json"
    if ours.exists() and plain.exists():
        spent, baseline = (json.loads(file.read_text("utf-8")) for file in (ours, plain))
        print(
            f"scan {spent}, plain forward+backward {baseline}: CPU time ratio {spent['cpu'] / baseline['cpu']:.2f}"
        )
    if (args.work / "pairs.json").exists():
        report_pairs(args, result)
    if (args.work / "plans.json").exists():
        plans = json.loads((args.work / "plans.json").read_text("utf-8"))
        report_plans(result, plans)
        if f"ours {FIT_BUDGETS[0]}" in plans:
            report_frontier(result, plans)
        if f"ours {BUDGETS[-1]}" in plans:
            report_budgets(result, plans)


def report_pairs(args: argparse.Namespace, result: Sensitivity) -> None:
    data = json.loads((args.work / "pairs.json").read_text("utf-8"))
    truth = {(u, f): sum(kl) / data["tokens"] for u, f, kl in data["pairs"]}
    scores = {
        "predicted KL": {(u.name, name): s.damage for u in result.units for name, s in u.formats.items()},
        "output error": {
            (u.name, name): s.output_error or 0.0 for u in result.units for name, s in u.formats.items()
        },
    }
    if (args.work / "gradient.json").exists():
        scores["gradient (AutoQuantize)"] = gradient_scores(args)
    print(
        f"\n| score | Spearman, {len(truth)} pairs | "
        + " | ".join(f"{f} only" for f in FORMATS[:3])
        + " | measured ÷ score |\n|---|---|---|---|---|---|"
    )
    for label, score in scores.items():
        cells = []
        for wanted in (FORMATS[:3], *((name,) for name in FORMATS[:3])):
            some = [key for key in truth if key[1] in wanted]
            cells.append(f"{spearmanr([score[k] for k in some], [truth[k] for k in some]).statistic:.3f}")
        ratio = np.exp(np.mean([np.log(value / score[key]) for key, value in truth.items()]))
        print(f"| {label} | " + " | ".join(cells) + f" | {ratio:.3g} |")


def predict(result: Sensitivity, plan: dict[str, str], interactions: bool) -> float:
    names = [(unit.name, plan[unit.name]) for unit in result.units]
    total = sum(unit.formats[plan[unit.name]].damage for unit in result.units)
    return total + float(cross_matrix(result, names).sum()) if interactions else total


def report_plans(result: Sensitivity, plans: dict[str, Any]) -> None:
    """Six random plans fit the calibration; all others are held out."""
    print(
        "\n| plan | bits | measured KL ± se | diagonal, calibrated | error | interactions, calibrated | error |\n|---|---|---|---|---|---|---|"
    )
    fitted = [name for name in plans if name.startswith("rand")][:6]
    points: dict[bool, dict[str, Point]] = {False: {}, True: {}}
    for name, entry in plans.items():
        made = described(result, entry["plan"], 0.0, 0.0)
        kl = np.array(entry["kl"])
        for interactions in (False, True):
            points[interactions][name] = Point(
                made.bits,
                made.bytes,
                predict(result, entry["plan"], interactions),
                float(kl.sum()) / entry["tokens"],
                float(kl.std(ddof=1) * len(kl) ** 0.5) / entry["tokens"],
            )
    maps = {i: fit([points[i][name] for name in fitted]) for i in (False, True)}
    errors: dict[bool, list[float]] = {False: [], True: []}
    for name in plans:
        cells = []
        for i in (False, True):
            point = points[i][name]
            cells += [f"{maps[i](point.predicted):.4f}", f"{100 * maps[i].error(point):+.1f} %"]
            if name not in fitted:
                errors[i].append(abs(maps[i].error(point)))
        point = points[False][name]
        mark = " (fit)" if name in fitted else ""
        print(
            f"| {name}{mark} | {point.bits:.2f} | {point.measured:.4f} ± {point.stderr:.4f} | "
            + " | ".join(cells)
            + " |"
        )
    for i, label in ((False, "diagonal"), (True, "interactions")):
        e = np.array(errors[i])
        print(
            f"\n{label}: {len(e)} held-out plans, mean |error| {100 * e.mean():.1f} %, largest {100 * e.max():.1f} %, "
            f"{(e <= 0.15).sum()} within 15 %; slope {maps[i].slope:.3f}, factor {np.exp(maps[i].intercept):.3f}"
        )


def report_frontier(result: Sensitivity, plans: dict[str, Any]) -> None:
    """Plans along the frontier, predicted after four of them were measured."""
    points: dict[str, Point] = {}
    for text in (*FIT_BUDGETS, *HELD_OUT_BUDGETS):
        entry = plans[f"ours {text}"]
        made = described(result, entry["plan"], 0.0, 0.0)
        kl = np.array(entry["kl"])
        stderr = float(kl.std(ddof=1) * len(kl) ** 0.5) / entry["tokens"]
        points[text] = Point(
            made.bits,
            made.bytes,
            predict(result, entry["plan"], True),
            float(kl.sum()) / entry["tokens"],
            stderr,
        )
    calibration = fit([points[text] for text in FIT_BUDGETS])
    print("\n| frontier plan | measured KL ± se | calibrated prediction | error |\n|---|---|---|---|")
    for text, point in sorted(points.items(), key=lambda item: item[1].bits):
        mark = " (fit)" if text in FIT_BUDGETS else ""
        print(
            f"| {text}{mark} | {point.measured:.4f} ± {point.stderr:.4f} | {calibration(point.predicted):.4f} | "
            f"{100 * calibration.error(point):+.1f} % |"
        )
    errors = np.abs([calibration.error(points[text]) for text in HELD_OUT_BUDGETS])
    print(
        f"\n{len(errors)} held-out frontier plans: mean |error| {100 * errors.mean():.1f} %, largest {100 * errors.max():.1f} %, "
        f"{(errors <= 0.15).sum()} within 15 %"
    )


def report_budgets(result: Sensitivity, plans: dict[str, Any]) -> None:
    uniform = {
        text: "uniform w3g32" if text in ("3.75bits", "4bits") else "uniform w4g64" for text in BUDGETS
    }
    print("\n| budget | allocation | bytes | measured KL | KL ÷ ours [95 %] |\n|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for text in BUDGETS:
        ours = np.array(plans[f"ours {text}"]["kl"])
        rows = [
            uniform[text],
            *(f"{label} {text}" for label in ("output mse", "gradient", "diagonal", "ours")),
        ]
        for name in rows:
            kl = np.array(plans[name]["kl"])
            draws = rng.integers(0, len(kl), (4000, len(kl)))
            ratio = kl[draws].sum(1) / ours[draws].sum(1)
            low, high = np.quantile(ratio, [0.025, 0.975])
            made = described(result, plans[name]["plan"], 0.0, 0.0)
            print(
                f"| {text} | {name.removesuffix(' ' + text)} | {made.bytes / 1e6:.2f} MB | {kl.sum() / plans[name]['tokens']:.4f} | "
                f"{kl.sum() / ours.sum():.3f} [{low:.3f}, {high:.3f}] |"
            )


def save(file: Path, data: Any) -> None:
    unfinished = file.with_name(f".{file.name}.partial")
    unfinished.write_text(json.dumps(data), "utf-8")
    unfinished.replace(file)


def main() -> None:
    steps: dict[str, Callable[[argparse.Namespace], Any]] = {
        "scan": run_scan,
        "time": run_time,
        "truth": run_truth,
        "gradient": gradient_scores,
        "budgets": run_budgets,
        "frontier": run_frontier,
        "report": run_report,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=steps)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--evaluation", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32, help="sequences that are scanned")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--memory", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


if __name__ == "__main__":
    main()
