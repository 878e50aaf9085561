"""What a scan will take, before it starts."""

import time
from dataclasses import dataclass

import torch

from compressor.sensitivity.scan import ScanJob

_RUNTIME_BYTES = 600e6  # Python, torch and transformers themselves


@dataclass(frozen=True)
class ScanEstimate:
    """``evaluations`` counts unit × format pairs; times are for this machine."""

    units: int
    evaluations: int
    tokens: int
    memory_bytes: int
    disk_bytes: int
    seconds: float


def estimate(job: ScanJob) -> ScanEstimate:
    """Estimate from shapes and one timed matrix product; reads no weights.

    Work, in products of all units with all tokens: one forward pass to cache block inputs, one with gradients,
    one backward pass for each draw, and one output error for each format. ``measured`` instead runs half a
    forward pass for every unit × format. Nothing grows faster than linearly in tokens or blocks.
    """
    settings, graph = job.settings, job.graph
    tokens = job.tokens.input_ids.numel()
    numel = sum(unit.numel for unit in graph.units)
    pairs = sum(len(formats) for formats in job.formats.values())
    formats = pairs / len(graph.units)
    stored = job.skeleton.stored.get(f"{graph.embedding}.weight")
    head = stored.numel if stored else 0
    match settings.score:
        case "fisher":
            passes, heads, draws = 2 + settings.draws + formats, 1 + settings.draws, settings.draws
        case "output-mse":
            passes, heads, draws = 2 + formats, 0, 0
        case "measured":
            passes, heads, draws = 1 + pairs / 2, 1 + pairs, 0
    work = 2 * tokens * (passes * numel + heads * head)
    search = 25 * 8 * numel * formats  # the scale search, element-wise
    item = job.dtype.itemsize
    hidden = tokens * graph.layers[0].in_features * item
    widths = sum(layer.out_features for unit in graph.units_of(0) for layer in unit.layers)
    inside = settings.memory * 2**30 + widths * tokens * item * 2 * draws / max(1, len(job.tokens.input_ids))
    block = max(sum(u.numel for u in graph.units_of(i)) for i in range(len(graph.blocks)))
    weights = numel if settings.score == "measured" else block * (1 + formats)
    memory = _RUNTIME_BYTES + inside + (weights + head) * item
    disk = hidden * (len(graph.blocks) + 1 + 2 * draws) + 4 * tokens * draws * pairs
    return ScanEstimate(
        len(graph.units), pairs, tokens, int(memory), int(disk), 1.3 * work / _speed(job) + search / 1e9
    )


def _speed(job: ScanJob) -> float:
    """Floating-point operations per second of a matrix product on the job's device."""
    a = torch.randn(512, 1024, dtype=job.dtype, device=job.device)
    b = torch.randn(1024, 1024, dtype=job.dtype, device=job.device)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (a @ b)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * 512 * 1024 * 1024 / best
