"""What each unit's error costs, and what each fix would save: second-order KL from one backward pass.

The same estimate as a sensitivity scan's (:mod:`compressor.sensitivity.probes`), but of the errors that the checkpoint
really has. Each unit is judged alone, in the original model, so that a broken one does not blur the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compressor.calibration.stream import Stream, loaded_ends
from compressor.checkpoint.compressed_tensors import scale_dtype
from compressor.console import steps
from compressor.diagnosis.compare import Compared
from compressor.diagnosis.job import DiagnoseJob, weight_of
from compressor.engines import check as check_engine
from compressor.formats import DENSE, GROUP_SIZES, Format, fitting, parse_format
from compressor.graph import Unit, load, unload
from compressor.graph.assign import layer_bytes
from compressor.rounding.unit import Method
from compressor.sensitivity.candidates import candidates_of, input_moments
from compressor.sensitivity.damage import from_products
from compressor.sensitivity.journal import Journal
from compressor.sensitivity.probes import (
    BlockProbes,
    Candidate,
    Column,
    head_gradients,
    layers_by_name,
    score_batch,
    scored_positions,
)

# Being made again is not free either: a fix without extra bytes counts as if it took this share of a unit's, or
# those that save next to nothing for nothing would come before all others.
_EFFORT = 0.01


@dataclass(frozen=True)
class Fix:
    """``adaround`` rounds the unit again in its own format, its prediction being that of the GPTQ codes it starts from;
    ``finer``, ``w8`` and ``bf16`` change its format. ``gain`` is predicted, in nats per token; ``extra_bytes`` may be
    negative."""

    unit: Unit
    kind: str
    format: Format
    gain: float
    extra_bytes: int
    effort_bytes: float

    @property
    def worth(self) -> float:
        """KL saved per byte, what it is ranked by."""
        return self.gain / max(float(self.extra_bytes), self.effort_bytes)


@dataclass(frozen=True)
class Predicted:
    """``damage`` and its standard error, by unit name, in nats per token; ``fixes`` with a gain, best first."""

    damage: dict[str, float]
    stderr: dict[str, float | None]
    fixes: list[Fix]


def alternatives(unit: Unit, fmt: Format, engine: str | None) -> list[tuple[str, Format]]:
    """Kinds of fix for a unit, with the formats they give it; those that ``engine`` cannot load are left out."""
    if not fmt.quantized:
        return []
    found: list[tuple[str, Format]] = []
    if fmt.kind == "int":
        found.append(("adaround", fmt))
    if fmt.kind == "int" and fmt.activations is None:
        for size in GROUP_SIZES:
            finer = fitting(parse_format(f"w{fmt.bits}g{size}"), *(la.in_features for la in unit.layers))
            if finer is not None and size < (fmt.group_size or 2**31) and ("finer", finer) not in found:
                found.append(("finer", finer))
    if fmt.bits < 8 or fmt.activations is not None:
        found.append(("w8", parse_format("w8")))
    found.append(("bf16", DENSE))
    return [(kind, f) for kind, f in found if engine is None or not check_engine(engine, unit.layers, f)]


def fit_part(stream: Stream) -> Stream:
    """The first half of the batches: what fixes are rounded on."""
    half = max(1, len(stream.batches) // 2)
    return replace(stream, batches=stream.batches[:half], calls=stream.calls[:half])


def predict(job: DiagnoseJob, compared: Compared, journal: Journal) -> Predicted:
    """Score every unit's error and every fix of it, last block first."""
    stream, graph, scan = compared.streams[0], job.graph, job.scan
    draws, count = job.settings.draws, len(graph.blocks)
    sides = [
        journal.tensor(f"gradients-{side}", (draws, *stream.hidden.shape), scan.dtype) for side in (0, 1)
    ]
    if "head" not in journal.finished:
        with loaded_ends(job.original, graph, dtype=scan.dtype, device=scan.device):
            for number, batch in enumerate(stream.batches):
                final = compared.original[-1][batch].to(scan.device)
                sides[count % 2][:, batch] = head_gradients(
                    job.original, graph, stream, number, final, draws, job.settings.seed
                )
        journal.finish("head")
    columns = [
        (unit.name, label.name) for unit in graph.units for label in _labels(job, unit) if label.quantized
    ]
    products: dict[Column, Tensor] = dict(
        zip(
            columns,
            journal.tensor("products", (len(columns), draws, *stream.valid.shape), torch.float32),
            strict=True,
        )
    )
    with steps("predicting", count) as progress:
        for index in reversed(range(count)):
            path, units = graph.blocks[index], graph.units_of(index)
            if f"predict {index}" in journal.finished:
                progress.advance(path)
                continue
            block = load(job.original, path, dtype=scan.dtype, device=scan.device)
            modules = layers_by_name(block, path, units)
            moments = input_moments(fit_part(stream), block, index, compared.original[index], units, modules)
            candidates = [
                candidate for unit in units for candidate in _candidates(job, unit, modules, moments)
            ]
            probes = BlockProbes(products={c.column: products[c.column] for c in candidates})
            for number, batch in enumerate(stream.batches):
                sides[index % 2][:, batch] = score_batch(
                    stream,
                    block,
                    index,
                    number,
                    compared.original[index][batch].to(scan.device),
                    sides[(index + 1) % 2][:, batch].to(scan.device),
                    modules,
                    candidates,
                    probes,
                )
            unload(block)
            journal.finish(f"predict {index}")
            progress.advance(path)
    tokens = int(scored_positions(job.original, stream).sum())
    damages = from_products(products, {unit.name: unit.kind for unit in graph.units}, tokens)
    now = {
        u.name: damages.damage[u.name, _now(job.format_of(u)).name]
        for u in graph.units
        if job.format_of(u).quantized
    }
    stderr = {name: damages.stderr[name, _now(_format(job, name)).name] for name in now}
    fixes = [
        fix
        for unit in graph.units
        if unit.name in now
        for kind, fmt in alternatives(unit, job.format_of(unit), job.settings.engine)
        if (fix := _fix(job, unit, kind, fmt, now[unit.name], damages.damage)).gain > 0
    ]
    return Predicted(now, stderr, sorted(fixes, key=lambda fix: -fix.worth))


def stored(job: DiagnoseJob, unit: Unit, fmt: Format) -> int:
    """Bytes that the unit takes in a format."""
    return sum(layer_bytes(job.original, layer, fmt) for layer in unit.layers)


def _fix(
    job: DiagnoseJob, unit: Unit, kind: str, fmt: Format, now: float, damage: dict[Column, float]
) -> Fix:
    extra = stored(job, unit, fmt) - stored(job, unit, job.format_of(unit))
    after = damage[unit.name, fmt.name] if fmt.quantized else 0.0
    mean = sum(stored(job, u, job.format_of(u)) for u in job.graph.units) / len(job.graph.units)
    return Fix(unit, kind, fmt, now - after, extra, _EFFORT * mean)


def _now(fmt: Format) -> Format:
    """The format under another name: what is stored, as opposed to what rounding again would give."""
    return replace(fmt, name=f"{fmt.name} as stored")


def _format(job: DiagnoseJob, unit: str) -> Format:
    return next(job.format_of(u) for u in job.graph.units if u.name == unit)


def _labels(job: DiagnoseJob, unit: Unit) -> list[Format]:
    fmt = job.format_of(unit)
    found = [_now(fmt), *(f for _, f in alternatives(unit, fmt, job.settings.engine))]
    return found if fmt.quantized else []


def _candidates(
    job: DiagnoseJob, unit: Unit, modules: dict[str, nn.Linear], moments: dict[str, Tensor]
) -> Iterator[Candidate]:
    labels = [fmt for fmt in _labels(job, unit) if fmt.quantized]
    if not labels:
        return
    errors = {
        layer.name: (weight_of(job, layer.name) - modules[layer.name].weight).cpu() for layer in unit.layers
    }
    yield Candidate(unit, labels[0], errors)
    stored = scale_dtype(job.original.dtype)
    for fmt in labels[1:]:
        # At eight bits what GPTQ would gain on plain rounding is nothing beside what the fix gains.
        method: Method = "rtn" if fmt.bits == 8 and fmt != job.format_of(unit) else "gptq"
        yield from candidates_of(unit, modules, [fmt], moments, method=method, scale_dtype=stored)
