"""Carry fixes out and measure them: the compressed model with a few units changed, from their block on.

Units are rounded again on the first half of the text, on the inputs that the compressed model gives them; what that
gains is measured on the other half.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor.calibration.stream import Stream, advance, loaded_ends, tail
from compressor.checkpoint.compressed_tensors import scale_dtype
from compressor.console import steps
from compressor.diagnosis.compare import Compared, activation_formats
from compressor.diagnosis.job import DiagnoseJob, load_compressed
from compressor.diagnosis.predict import Fix, fit_part
from compressor.evaluation.bootstrap import Estimate, estimate, resample_sums
from compressor.evaluation.metrics import RESAMPLES
from compressor.formats import Format
from compressor.graph import load, set_weight, unload
from compressor.rounding.learned import LearnedWeight
from compressor.rounding.reconstruct import ReconstructSettings, reconstruct_block
from compressor.sensitivity.candidates import input_moments, rounded_layers
from compressor.sensitivity.journal import Journal
from compressor.sensitivity.measured import sequence_kl
from compressor.sensitivity.probes import layers_by_name, scored_positions


@dataclass(frozen=True)
class Attempt:
    """``gain`` in nats per token on the held-out sequences, over the fixes that were kept before it."""

    fix: Fix
    gain: Estimate
    kept: bool


@dataclass
class Patch:
    """What was kept so far: weights by layer name, as an engine would compute with them, and their formats."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    formats: dict[str, Format] = field(default_factory=dict)

    def __or__(self, other: "Patch") -> "Patch":
        return Patch(self.weights | other.weights, self.formats | other.formats)


@dataclass(frozen=True)
class Tried:
    """``kl`` of each held-out sequence before and after, in nats, ``counts`` their tokens."""

    attempts: list[Attempt]
    before: list[float]
    after: list[float]
    counts: list[int]


def held_out(stream: Stream) -> slice:
    """The sequences that :func:`fit_part` leaves, or all where it leaves none."""
    end = fit_part(stream).batches[-1].stop
    total = len(stream.input_ids)
    return slice(end, total) if end < total else slice(0, total)


def attempt(job: DiagnoseJob, compared: Compared, journal: Journal, fixes: Sequence[Fix]) -> Tried:
    """Carry out one fix after another, each on top of those that gained more than their uncertainty.

    On top, not alone: two units that each make up for the same error would do it twice. The hidden states of a fix go to
    another file than those it starts from, and the two change places when it is kept, so what is journalled stays whole.
    """
    assert compared.kl is not None
    part = held_out(compared.streams[0])
    before, counts = compared.kl[part], compared.counts[part]
    trial = journal.tensor("trial", tuple(compared.compressed.shape), job.scan.dtype)
    now, patch, attempts = before, Patch(), []
    with steps("trying fixes", len(fixes)) as progress:
        for number, fix in enumerate(fixes):
            weights = journal.directory / f"fix-{number}.safetensors"
            known = journal.finished.get(f"fix {number}")
            if known is None:
                made = _carry_out(job, compared, fix, patch)
                kl = _run(job, compared, fix.unit.block, patch | made, trial)[part]
                trial[: fix.unit.block + 1] = compared.compressed[: fix.unit.block + 1]
                save_file({name: w.cpu().contiguous() for name, w in made.weights.items()}, weights)
                journal.finish(f"fix {number}", {"kl": kl})
            else:
                kl, made = known["kl"], _read_patch(job, fix, weights)
            gain = per_token(now, kl, counts, job.settings.seed)
            kept = gain.value > 0 and (gain.low is None or gain.low > 0)
            attempts.append(Attempt(fix, gain, kept))
            if kept:
                now, patch = kl, patch | made
                compared, trial = replace(compared, compressed=trial), compared.compressed
            progress.advance(f"{fix.unit.name} {fix.kind}")
    return Tried(attempts, before, now, counts)


def _read_patch(job: DiagnoseJob, fix: Fix, file: Path) -> Patch:
    weights = {name: w.to(job.scan.device) for name, w in load_file(file).items()}
    return Patch(weights, dict.fromkeys(weights, fix.format))


def per_token(
    kl: Sequence[float], minus: Sequence[float] | None, counts: Sequence[int], seed: int
) -> Estimate:
    """KL per token from sums over sequences, or its difference to another's on the same ones, with its interval."""
    columns = {
        "kl": np.asarray(kl, dtype=np.float64) - (0.0 if minus is None else np.asarray(minus)),
        "count": np.asarray(counts, dtype=np.float64),
    }
    sums = resample_sums(columns, resamples=RESAMPLES, seed=seed)
    return estimate(lambda s: s["kl"] / s["count"], columns, sums)


def _run(job: DiagnoseJob, compared: Compared, start: int, patch: Patch, into: Tensor) -> list[float]:
    """KL of each sequence with ``patch`` in place of the checkpoint's weights; ``into`` gets the hidden states after block
    ``start`` and later ones."""
    ours, theirs = compared.streams
    stream = replace(theirs, hidden=compared.compressed[start].clone())
    for index in range(start, len(job.graph.blocks)):
        block = _patched(job, index, patch)
        path = f"{job.graph.blocks[index]}."
        formats = activation_formats(job, index, block)
        for name, fmt in patch.formats.items():
            if name.startswith(path):
                formats[block.get_submodule(name.removeprefix(path))] = fmt
        advance(stream, block, index, formats)
        into[index + 1] = stream.hidden
        unload(block)
    scored = scored_positions(job.original, ours)
    kl: list[float] = []
    device, dtype = job.scan.device, job.scan.dtype
    with (
        loaded_ends(job.original, job.graph, dtype=dtype, device=device),
        loaded_ends(job.twin, job.graph, dtype=dtype, device=device),
        torch.inference_mode(),
    ):
        for number, batch in enumerate(ours.batches):
            before = compared.original[-1][batch].to(device)
            after = stream.hidden[batch].to(device)
            kl += sequence_kl(
                tail(job.original, job.graph, ours, number, before),
                tail(job.twin, job.graph, stream, number, after),
                scored[batch],
            )
    return kl


def _patched(job: DiagnoseJob, index: int, patch: Patch) -> nn.Module:
    """Block ``index`` of the checkpoint with what was kept so far."""
    block = load_compressed(job, index)
    path = f"{job.graph.blocks[index]}."
    for name, weight in patch.weights.items():
        if name.startswith(path):
            set_weight(block, f"{name.removeprefix(path)}.weight", weight)
    return block


def _carry_out(job: DiagnoseJob, compared: Compared, fix: Fix, patch: Patch) -> Patch:
    """The unit's new weights, for a model that ``patch`` has been applied to."""
    unit, index, scan = fix.unit, fix.unit.block, job.scan
    path = job.graph.blocks[index]
    source = load(job.original, path, dtype=scan.dtype, device=scan.device)
    originals = {
        name: module.weight.detach() for name, module in layers_by_name(source, path, (unit,)).items()
    }
    formats = dict.fromkeys(originals, fix.format)
    unload(source)
    if not fix.format.quantized:
        return Patch(originals, formats)
    block = _patched(job, index, patch)
    modules = layers_by_name(block, path, (unit,))
    inputs = compared.compressed[index]
    fit = fit_part(compared.streams[1])
    moments = input_moments(fit, block, index, inputs, (unit,), modules)
    stored = scale_dtype(job.original.dtype)
    found = rounded_layers(unit, originals, fix.format, moments, method="gptq", scale_dtype=stored)
    if fix.kind == "adaround":
        for name, weight in found.items():
            value = weight.dequantize(job.original.dtype).to(scan.device, scan.dtype)
            set_weight(block, f"{name.removeprefix(f'{path}.')}.weight", value)
        learned = {
            name.removeprefix(f"{path}."): LearnedWeight(weight, originals[name], stored)
            for name, weight in found.items()
        }
        activations = {
            name.removeprefix(f"{path}."): fmt
            for name, fmt in (job.formats | patch.formats).items()
            if name.startswith(f"{path}.")
        }
        better = reconstruct_block(
            block,
            index,
            fit,
            inputs,
            compared.original[index + 1],
            learned,
            activations,
            ReconstructSettings(iterations=job.settings.iterations),
            job.settings.seed,
        )
        found = {f"{path}.{name}": weight for name, weight in better.weights.items()}
    unload(block)
    weights = {
        name: weight.dequantize(job.original.dtype).to(device=scan.device, dtype=scan.dtype)
        for name, weight in found.items()
    }
    return Patch(weights, formats)
