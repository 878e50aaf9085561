"""Scan a model: forward once to the end, then block by block back to the start, scoring every unit × format.

Memory is one block, one batch of its activations and the hidden states (memory-mapped files). Damage is in
nats per token, so that scores of different scans compare.
"""

import hashlib
import importlib.metadata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor import __version__
from compressor.calibration.stream import Stream, advance, loaded_ends
from compressor.checkpoint.compressed_tensors import scale_dtype
from compressor.console import steps, warn
from compressor.errors import InputRefused, UsageError
from compressor.formats import Format, parse_format
from compressor.graph import ModelGraph, Skeleton, build_skeleton, discover, load, unload
from compressor.graph.assign import layer_bytes, refuse_unsupported
from compressor.rounding.unit import Method
from compressor.sensitivity.candidates import candidates_of, formats_of_units, input_moments, weight_error
from compressor.sensitivity.damage import Damages, from_measurements, from_output_errors, from_products
from compressor.sensitivity.journal import Journal, block_records, block_step
from compressor.sensitivity.measured import measure_units, stream_of
from compressor.sensitivity.probes import (
    BlockProbes,
    Column,
    head_gradients,
    layers_by_name,
    score_batch,
    scored_positions,
)
from compressor.sensitivity.schema import (
    FormatScore,
    Kept,
    Layer,
    ScoreKind,
    Sensitivity,
    UnitScores,
)
from compressor.sources.model import Source, load_tokenizer, open_model
from compressor.sources.tensors import file_sha256
from compressor.sources.text import TokenSet, read_rows, tokenize


@dataclass(frozen=True)
class ScanSettings:
    """What to scan and how; ``memory`` is GiB of activations inside a block at once."""

    model: str
    formats: tuple[str, ...]
    score: ScoreKind = "fisher"
    engine: str | None = None
    rounding: Method = "rtn"
    draws: int = 4
    data: str = "builtin"
    column: str | None = None
    split: str | None = None
    samples: int = 32
    sequence_length: int = 256
    memory: float = 1.0
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False


@dataclass(frozen=True)
class ScanJob:
    """Everything that is known before a weight is read. ``formats`` are the quantized ones by unit name."""

    settings: ScanSettings
    source: Source
    skeleton: Skeleton
    graph: ModelGraph
    formats: dict[str, tuple[Format, ...]]
    tokens: TokenSet
    device: torch.device
    dtype: torch.dtype
    warnings: tuple[str, ...]


def prepare(settings: ScanSettings, device: torch.device) -> ScanJob:
    """Every check that needs no forward pass. Raises InputRefused or UsageError naming what is at fault."""
    wanted = [parse_format(name) for name in settings.formats]
    if settings.draws < 1:
        raise UsageError(f"--draws {settings.draws}: at least 1 is needed")
    rows = read_rows(settings.data, column=settings.column, split=settings.split)
    source = open_model(
        settings.model,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        allow_pickle=settings.allow_pickle,
    )
    skeleton = build_skeleton(source)
    graph = discover(skeleton)
    refuse_unsupported(skeleton, graph)
    if len(graph.stages) > 1:
        raise InputRefused(
            f"{source.path}: {type(skeleton.module).__name__} is an encoder-decoder, which a scan does not support: quantize it "
            "with one --scheme"
        )
    if settings.score != "output-mse" and not graph.head:
        raise InputRefused(
            f"{source.path}: {type(skeleton.module).__name__} has no output head, so there is no KL to predict: "
            "pass --score output-mse"
        )
    formats, warnings = formats_of_units(graph, wanted, settings.engine)
    tokens = tokenize(
        rows,
        load_tokenizer(source),
        samples=settings.samples,
        sequence_length=settings.sequence_length,
        pick="spread",
        seed=settings.seed,
    )
    limit = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens.input_ids.shape[1] > limit:
        raise UsageError(
            f"--sequence-length {settings.sequence_length} is longer than the model's max_position_embeddings {limit}"
        )
    # Half precision is slow on CPUs without matrix units and adds error everywhere: use it on GPUs only.
    dtype = torch.float32 if device.type == "cpu" else skeleton.dtype
    return ScanJob(
        settings,
        source,
        skeleton,
        graph,
        formats,
        tokens,
        device,
        dtype,
        (*tokens.report.warnings, *warnings),
    )


def scan(job: ScanJob, output: Path) -> Sensitivity:
    """Run the scan; working files lie beside ``output`` and are removed when it is complete."""
    for message in job.warnings:
        warn(message)
    digest = hashlib.sha256(
        "".join(file_sha256(file) for file in job.source.weight_files).encode()
    ).hexdigest()
    with Journal(output, _fingerprint(job, digest)) as journal:
        stream = stream_of(job)
        hidden = journal.tensor("hidden", (len(job.graph.blocks) + 1, *stream.hidden.shape), job.dtype)
        _forward(job, stream, journal, hidden)
        tokens = int(scored_positions(job.skeleton, stream).sum())
        match job.settings.score:
            case "measured":
                records = measure_units(job, stream, journal, hidden)
                damages = from_measurements(records, tokens)
            case "output-mse":
                records = _backward(job, stream, journal, hidden)
                damages = from_output_errors(records)
            case "fisher":
                records = _backward(job, stream, journal, hidden)
                kinds = {unit.name: unit.kind for unit in job.graph.units}
                damages = from_products(_products(job, journal, stream), kinds, tokens)
        journal.remove()
    return _collect(job, digest, records, damages, tokens)


def _forward(job: ScanJob, stream: Stream, journal: Journal, hidden: Tensor) -> None:
    """Fill ``hidden`` [blocks + 1, n, T, H] with every block's input and the last one's output."""
    # What blocks pass on to later ones is in the stream alone: those models go forward again.
    if "forward" in journal.finished and not stream.passed_on:
        return
    with steps("forward", len(job.graph.blocks)) as progress:
        for index, path in enumerate(job.graph.blocks):
            hidden[index] = stream.hidden
            block = load(job.skeleton, path, dtype=job.dtype, device=job.device)
            advance(stream, block, index)
            unload(block)
            progress.advance()
    hidden[-1] = stream.hidden
    journal.finish("forward")


def _backward(job: ScanJob, stream: Stream, journal: Journal, hidden: Tensor) -> dict[int, dict[str, Any]]:
    """Score all blocks, last first; returns their records by block index."""
    draws = job.settings.draws if job.settings.score == "fisher" else 0
    count = len(job.graph.blocks)
    shape = (draws, *stream.hidden.shape)
    sides = [journal.tensor(f"gradients-{side}", shape, job.dtype) for side in (0, 1)] if draws else []
    products = _products(job, journal, stream)
    if draws and "head" not in journal.finished:
        with (
            loaded_ends(job.skeleton, job.graph, dtype=job.dtype, device=job.device),
            steps("head", len(stream.batches)) as progress,
        ):
            for number, batch in enumerate(stream.batches):
                sides[count % 2][:, batch] = head_gradients(
                    job.skeleton,
                    job.graph,
                    stream,
                    number,
                    hidden[-1][batch].to(job.device),
                    draws,
                    job.settings.seed,
                )
                progress.advance()
        journal.finish("head")

    with steps("scoring", count) as progress:
        for index in reversed(range(count)):
            if block_step(index) not in journal.finished:
                at_output = sides[(index + 1) % 2] if draws else torch.empty(shape)
                at_input = sides[index % 2] if draws else None
                record = _score_block(job, stream, index, hidden[index], at_output, at_input, products)
                journal.finish(block_step(index), record)
            progress.advance()
    return block_records(journal, count)


def _score_block(
    job: ScanJob,
    stream: Stream,
    index: int,
    hidden: Tensor,
    at_output: Tensor,
    at_input: Tensor | None,
    products: dict[Column, Tensor],
) -> dict[str, Any]:
    path = job.graph.blocks[index]
    units = job.graph.units_of(index)
    block = load(job.skeleton, path, dtype=job.dtype, device=job.device)
    modules = layers_by_name(block, path, units)
    moments: dict[str, Tensor] = {}
    if job.settings.rounding == "gptq":
        moments = input_moments(stream, block, index, hidden, units, modules)
    candidates = [
        candidate
        for unit in units
        for candidate in candidates_of(
            unit,
            modules,
            job.formats[unit.name],
            moments,
            method=job.settings.rounding,
            scale_dtype=scale_dtype(job.skeleton.dtype),
        )
    ]
    into = BlockProbes(
        products={c.column: products[c.column] for c in candidates} if at_input is not None else {}
    )
    for number, batch in enumerate(stream.batches):
        gradients = score_batch(
            stream,
            block,
            index,
            number,
            hidden[batch].to(job.device),
            at_output[:, batch].to(job.device),
            modules,
            candidates,
            into,
        )
        if at_input is not None:
            at_input[:, batch] = gradients
    record = {
        "candidates": [
            {
                "column": c.column,
                "weight_error": weight_error(c, modules),
                "output_error": float(into.relative[c.column]) / (len(c.errors) * len(hidden)),
            }
            for c in candidates
        ]
    }
    unload(block)
    return record


def _products(job: ScanJob, journal: Journal, stream: Stream) -> dict[Column, Tensor]:
    """File-backed space for the products of every unit × format, each [draws, n, length]; empty without probes."""
    if job.settings.score != "fisher":
        return {}
    columns = [(unit.name, fmt.name) for unit in job.graph.units for fmt in job.formats[unit.name]]
    shape = (len(columns), job.settings.draws, *stream.valid.shape)
    return dict(zip(columns, journal.tensor("products", shape, torch.float32), strict=True))


def _collect(
    job: ScanJob, digest: str, records: dict[int, dict[str, Any]], damages: Damages, tokens: int
) -> Sensitivity:
    entries = {tuple(e["column"]): e for index in sorted(records) for e in records[index]["candidates"]}
    item = job.skeleton.dtype.itemsize
    found: dict[Column, FormatScore] = {}
    for unit in job.graph.units:
        for fmt in job.formats[unit.name]:
            column = (unit.name, fmt.name)
            found[column] = FormatScore(
                damage=damages.damage[column],
                stderr=damages.stderr[column],
                weight_error=entries[column]["weight_error"],
                output_error=entries[column]["output_error"],
                bytes=sum(layer_bytes(job.skeleton, layer, fmt) for layer in unit.layers),
            )
    dense = parse_format("bf16")
    units = tuple(
        UnitScores(
            name=unit.name,
            kind=unit.kind,
            block=unit.block,
            layers=tuple(
                Layer(name=la.name, out_features=la.out_features, in_features=la.in_features)
                for la in unit.layers
            ),
            formats={
                **{fmt.name: found[unit.name, fmt.name] for fmt in job.formats[unit.name]},
                dense.name: FormatScore(
                    damage=0.0, stderr=0.0, weight_error=0.0, output_error=0.0, bytes=unit.numel * item
                ),
            },
        )
        for unit in job.graph.units
    )
    kept = {
        name: Kept(
            reason=reason, bytes=entry.nbytes if (entry := job.skeleton.stored.get(f"{name}.weight")) else 0
        )
        for name, reason in job.graph.kept.items()
    }
    total = sum(entry.nbytes for entry in job.source.tensors.values())
    in_units = sum(unit.formats[dense.name].bytes for unit in units)
    return Sensitivity(
        model=job.settings.model,
        weights_sha256=digest,
        score=job.settings.score,
        rounding=job.settings.rounding,
        engine=job.settings.engine,
        seed=job.settings.seed,
        draws=job.settings.draws,
        sequences_used=len(job.tokens.input_ids),
        sequence_length=job.tokens.input_ids.shape[1],
        tokens=tokens,
        data=job.settings.data,
        column=job.settings.column,
        split=job.settings.split,
        data_sha256=job.tokens.report.sha256,
        device=job.device.type,
        dtype=str(job.dtype).removeprefix("torch."),
        parameters=sum(unit.numel for unit in job.graph.units),
        source_bytes=total,
        other_bytes=total - in_units - sum(layer.bytes for layer in kept.values()),
        formats=tuple(dict.fromkeys([*(f.name for fs in job.formats.values() for f in fs), dense.name])),
        units=units,
        kept=kept,
        columns=damages.columns,
        factor=damages.factor,
        versions={
            "compressor": __version__,
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
    )


def _fingerprint(job: ScanJob, digest: str) -> dict[str, Any]:
    settings = asdict(job.settings)
    return {
        "compressor": __version__,
        "settings": settings,
        "weights": digest,
        "data": job.tokens.report.sha256,
        "device": job.device.type,
        "torch": torch.__version__,
    }
