"""What a quantization will take: memory, disk and time, from shapes and one timed matrix product."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from compressor.console import note
from compressor.pipelines.job import Job, estimated_disk_bytes
from compressor.recipes import Recipe

_RUNTIME_BYTES = 600e6  # Python, torch and transformers themselves


@dataclass(frozen=True)
class Estimate:
    """``formats`` maps a format to (layers, bytes); ``skipped`` kept layers to their reasons."""

    formats: dict[str, tuple[int, int]]
    skipped: dict[str, str]
    memory_bytes: int
    disk_bytes: int
    seconds: float


def estimate(job: Job, recipe: Recipe, speed: float | None = None) -> Estimate:
    """Estimate without reading weights; ``speed`` in operations per second is measured unless given.

    Work is counted as the products of a block's forward pass (once when all calibration sequences fit in
    one batch, otherwise about 2.5 times, for the replays), Σ x xᵀ per unit, the O(in³) factorization
    with its column updates, and for adaround its training steps; an Hessian is in² values per unit, the one cost that grows faster than the model.
    """
    formats: dict[str, tuple[int, int]] = {}
    for assignment in job.plan.layers.values():
        count, size = formats.get(assignment.format, (0, 0))
        formats[assignment.format] = (count + 1, size + (assignment.bytes or 0))
    skipped = {n: a.reason or "kept" for n, a in job.plan.kept().items()}

    calibrated = job.tokens is not None and recipe.quantize.method != "rtn"
    tokens = job.tokens.input_ids.numel() if calibrated and job.tokens is not None else 0
    item = job.compute_dtype.itemsize
    block = max(sum(u.numel for u in job.graph.units_of(i)) for i in range(len(job.graph.blocks)))
    widest = max(max(layer.in_features, layer.out_features) for layer in job.graph.layers)
    hidden = min(layer.in_features for layer in job.graph.layers)
    budget = recipe.quantize.calibration_memory * 2**30
    inside = min(budget, 6 * widest * item * tokens)
    embedding = job.skeleton.module.get_parameter(f"{job.graph.embedding}.weight").numel() * item
    hessian = max(layer.in_features for layer in job.graph.layers) ** 2 * 24 if tokens else 0
    memory = _RUNTIME_BYTES + block * (item + 12) + tokens * hidden * item + max(inside + hessian, embedding)

    passes = 1.0 if 6 * widest * item * tokens <= budget else 2.5
    work = passes * 2 * tokens * sum(unit.numel for unit in job.graph.units)
    for unit in job.graph.units if tokens else ():
        inputs = unit.layers[0].in_features
        work += 1.25 * tokens * inputs**2 + inputs**3 + 2 * unit.numel * inputs
    if recipe.quantize.method == "adaround" and job.tokens is not None:
        learned = recipe.quantize.adaround
        step = min(learned.batch, job.tokens.input_ids.shape[0]) * job.tokens.input_ids.shape[1]
        # Each step is a forward and a backward pass, and the original model goes along once.
        work += (6 * learned.iterations * step + 4 * tokens) * sum(unit.numel for unit in job.graph.units)
        memory += (
            20 * block + tokens * hidden * item * 2
        )  # values, gradients, moments, codes; inputs and targets
    search = 25 * 8 * sum(unit.numel for unit in job.graph.units)  # the scale search, element-wise
    return Estimate(
        formats,
        skipped,
        int(memory),
        estimated_disk_bytes(job),
        1.3 * work / (speed or _speed(job)) + search / 1e9,
    )


_ITERATIONS = (400, 200, 100, 50, 25)  # choices of auto


def resolve_method(job: Job, recipe: Recipe, begun: dict[str, Any] | None = None) -> tuple[Job, Recipe]:
    """Put a method in the place of ``auto``: of adaround with fewer and fewer iterations, gptq and rtn the first that is
    estimated to fit in the time budget, or rtn.

    Speeds vary from run to run, so one that was ``begun`` (with these settings) keeps what it chose.
    """
    settings = recipe.quantize
    if settings.method != "auto":
        return job, recipe
    assert settings.time_budget is not None
    choices = [
        settings.model_copy(
            update={"method": "adaround", "adaround": settings.adaround.model_copy(update={"iterations": n})}
        )
        for n in _ITERATIONS
    ] + [settings.model_copy(update={"method": method}) for method in ("gptq", "rtn")]
    speed = _speed(job)
    costs = [estimate(job, recipe.model_copy(update={"quantize": c}), speed).seconds for c in choices]
    fits = (i for i, cost in enumerate(costs) if cost <= 60 * settings.time_budget)
    at = next(fits, len(choices) - 1)
    for number, choice in enumerate(choices):
        if begun and all(
            begun.get(k) == v
            for k, v in choice.model_dump(mode="json", include={"method", "adaround"}).items()
        ):
            at = number
    chosen = choices[at]
    detail = f" with {chosen.adaround.iterations} iterations" if chosen.method == "adaround" else ""
    note(
        f"auto: {chosen.method}{detail}, about {costs[at] / 60:.1f} of {settings.time_budget:g} minutes; "
        f"gptq about {costs[-2] / 60:.1f}"
    )
    if chosen.method == "rtn" and chosen.kv_cache is None:
        job = replace(job, tokens=None)
    return job, recipe.model_copy(update={"quantize": chosen})


def _speed(job: Job) -> float:
    """Floating-point operations per second of a matrix product here, measured in about 0.1 s."""
    a = torch.randn(1024, 1024, device=job.device, dtype=job.compute_dtype)
    a @ a
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    start = time.perf_counter()
    for _ in range(3):
        a = a @ a * 1e-3
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return 3 * 2 * 1024**3 / (time.perf_counter() - start)
