"""Measured KL: of one unit at a time, restarting from cached block inputs, and of whole plans."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compressor.calibration.stream import Stream, advance, call_block, loaded_ends, open_stream, tail
from compressor.checkpoint.compressed_tensors import scale_dtype
from compressor.console import steps
from compressor.evaluation.pair import token_scores
from compressor.formats import Format, fake_quantize_activations, parse_format
from compressor.graph import load, unload
from compressor.sensitivity.candidates import candidates_of, input_moments, weight_error
from compressor.sensitivity.journal import Journal, block_records, block_step
from compressor.sensitivity.probes import Candidate, layers_by_name, scored_positions

if TYPE_CHECKING:
    from compressor.sensitivity.scan import ScanJob

_CHUNK = 1 << 22  # logits compared at a time


def measure_units(
    job: "ScanJob",
    stream: Stream,
    journal: Journal,
    hidden: Tensor,
    only: frozenset[tuple[str, str]] | None = None,
) -> dict[int, dict[str, Any]]:
    """KL of every unit × format (or of those in ``only``) with all else untouched; records by block index.

    The whole model is loaded. Each measurement runs from the unit's block on, on average half a forward pass.
    ``hidden`` [blocks + 1, n, T, H] are the original model's hidden states.
    """
    model = load(job.skeleton, "", dtype=job.dtype, device=job.device)
    scored = scored_positions(job.skeleton, stream)
    wanted = [
        index
        for index in range(len(job.graph.blocks))
        if block_step(index) not in journal.finished
        and (only is None or any(u.name in {name for name, _ in only} for u in job.graph.units_of(index)))
    ]
    blocks = [model.get_submodule(path) for path in job.graph.blocks]
    with torch.inference_mode(), steps("measuring", len(wanted)) as progress:
        baseline = [
            tail(job.skeleton, job.graph, stream, number, hidden[-1][batch].to(job.device))
            for number, batch in enumerate(stream.batches)
        ]
        for index in wanted:
            record = []
            for candidate, modules in _candidates(job, stream, blocks[index], index, hidden[index], only):
                kl = []
                with applied(candidate, modules):
                    for number, batch in enumerate(stream.batches):
                        state = hidden[index][batch].to(job.device)
                        for later in range(index, len(blocks)):
                            state = call_block(stream, blocks[later], later, number, state)
                        logits = tail(job.skeleton, job.graph, stream, number, state)
                        kl += sequence_kl(baseline[number], logits, scored[batch])
                record.append(
                    {
                        "column": candidate.column,
                        "kl": kl,
                        "weight_error": weight_error(candidate, modules),
                        "output_error": None,
                    }
                )
            journal.finish(block_step(index), {"candidates": record})
            progress.advance()
    for path in job.graph.blocks:
        unload(model.get_submodule(path))
    return block_records(journal, len(job.graph.blocks))


def _candidates(
    job: "ScanJob",
    stream: Stream,
    block: nn.Module,
    index: int,
    hidden: Tensor,
    only: frozenset[tuple[str, str]] | None,
) -> Iterator[tuple[Candidate, dict[str, nn.Linear]]]:
    units = job.graph.units_of(index)
    modules = layers_by_name(block, job.graph.blocks[index], units)
    moments: dict[str, Tensor] = {}
    if job.settings.rounding == "gptq":
        moments = input_moments(stream, block, index, hidden, units, modules)
    for unit in units:
        for fmt in job.formats[unit.name]:
            if only is not None and (unit.name, fmt.name) not in only:
                continue
            made = candidates_of(
                unit,
                modules,
                [fmt],
                moments,
                method=job.settings.rounding,
                scale_dtype=scale_dtype(job.skeleton.dtype),
            )
            yield made[0], modules


def measure_selected(
    job: "ScanJob", only: frozenset[tuple[str, str]], workdir: Path
) -> dict[tuple[str, str], float]:
    """Measured KL in nats per token of single units × formats; working files lie in ``workdir`` meanwhile."""
    stream = stream_of(job)
    tokens = int(scored_positions(job.skeleton, stream).sum())
    with Journal(workdir / "units", {"only": sorted(only)}) as journal:
        hidden = journal.tensor("hidden", (len(job.graph.blocks) + 1, *stream.hidden.shape), job.dtype)
        for index, path in enumerate(job.graph.blocks):
            hidden[index] = stream.hidden
            block = load(job.skeleton, path, dtype=job.dtype, device=job.device)
            advance(stream, block, index)
            unload(block)
        hidden[-1] = stream.hidden
        records = measure_units(job, stream, journal, hidden, only)
        journal.remove()
    entries = [entry for record in records.values() for entry in record["candidates"]]
    return {(e["column"][0], e["column"][1]): sum(e["kl"]) / tokens for e in entries}


def stream_of(job: "ScanJob") -> Stream:
    """The job's tokens before the first block, in batches whose logits (about five fp32 copies of them are alive
    in the head) and whose activations inside a block stay below the job's memory."""
    limit = int(job.settings.memory * 2**30)
    sequences, length = job.tokens.input_ids.shape
    vocabulary = getattr(job.skeleton.config.get_text_config(), "vocab_size", 1) if job.graph.head else 1
    widest = max(max(layer.out_features, layer.in_features) for layer in job.graph.layers)
    per_sequence = length * max(6 * widest * job.dtype.itemsize, 20 * vocabulary)
    rows = max(1, min(sequences, limit // per_sequence))
    return open_stream(
        job.skeleton,
        job.graph,
        job.tokens.input_ids,
        job.tokens.attention_mask,
        dtype=job.dtype,
        device=job.device,
        batch_bytes=rows * length * 6 * widest * job.dtype.itemsize,
    )


def measure_plan(job: "ScanJob", plan: Mapping[str, str], baseline: Tensor | None = None) -> list[float]:
    """KL summed over each sequence, in nats, of the model with ``plan`` (unit name to format name) carried out.

    One block is in memory at a time. ``baseline`` [n, T, H] is the original model's last hidden state
    (:func:`last_hidden`); it is computed when it is not given.
    """
    if baseline is None:
        baseline = last_hidden(job)
    final = last_hidden(job, plan)
    stream = stream_of(job)
    scored = scored_positions(job.skeleton, stream)
    kl: list[float] = []
    with loaded_ends(job.skeleton, job.graph, dtype=job.dtype, device=job.device), torch.inference_mode():
        for number, batch in enumerate(stream.batches):
            before = tail(job.skeleton, job.graph, stream, number, baseline[batch].to(job.device))
            after = tail(job.skeleton, job.graph, stream, number, final[batch].to(job.device))
            kl += sequence_kl(before, after, scored[batch])
    return kl


def last_hidden(job: "ScanJob", plan: Mapping[str, str] | None = None) -> Tensor:
    """The last block's output [n, T, H] under ``plan`` (unit name to format name), or of the original."""
    stream = stream_of(job)
    with steps("forward", len(job.graph.blocks)) as progress:
        for index, path in enumerate(job.graph.blocks):
            block = load(job.skeleton, path, dtype=job.dtype, device=job.device)
            activations: dict[nn.Module, Format] = {}
            for unit in job.graph.units_of(index) if plan else ():
                fmt = parse_format(plan[unit.name]) if plan else None
                if fmt is None or not fmt.quantized:
                    continue
                modules = layers_by_name(block, path, (unit,))
                moments: dict[str, Tensor] = {}
                if job.settings.rounding == "gptq":
                    moments = input_moments(stream, block, index, stream.hidden, [unit], modules)
                (candidate,) = candidates_of(
                    unit,
                    modules,
                    [fmt],
                    moments,
                    method=job.settings.rounding,
                    scale_dtype=scale_dtype(job.skeleton.dtype),
                )
                for name, delta in candidate.errors.items():
                    modules[name].weight.data += delta.to(job.device)
                    activations[modules[name]] = fmt
            advance(stream, block, index, activations)
            unload(block)
            progress.advance()
    return stream.hidden


def sequence_kl(baseline: Tensor, logits: Tensor, scored: Tensor) -> list[float]:
    """KL(baseline ‖ logits) summed over the scored positions of each sequence; logits are [batch, length, V]."""
    sums = []
    rows = max(1, _CHUNK // logits.shape[-1])
    for before, after, mask in zip(baseline, logits, scored.to(logits.device), strict=True):
        before, after = before[mask], after[mask]
        total = 0.0
        for b, a in zip(before.split(rows), after.split(rows), strict=True):
            kl = token_scores(a, b, torch.zeros(len(a), dtype=torch.int64, device=a.device)).kl
            assert kl is not None
            total += float(kl.sum())
        sums.append(total)
    return sums


@contextmanager
def applied(candidate: Candidate, modules: Mapping[str, nn.Linear]) -> Iterator[None]:
    """The unit is in its format inside, its inputs quantized where the format says so."""
    before = {name: modules[name].weight.data for name in candidate.errors}

    def quantize_input(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (fake_quantize_activations(args[0], candidate.format), *args[1:])

    with ExitStack() as stack:
        for name, delta in candidate.errors.items():
            modules[name].weight.data = before[name] + delta.to(before[name].device)
            if candidate.format.activations is not None:
                stack.callback(modules[name].register_forward_pre_hook(quantize_input).remove)
        try:
            yield
        finally:
            for name, weight in before.items():
                modules[name].weight.data = weight
