"""The teacher's targets on disk, so that it runs once: for several epochs, several students, or another machine.

    CACHE/manifest.json             what the targets depend on
    CACHE/shard-00000.safetensors   targets of some examples
    CACHE/shard-00000.json          their keys, rows and the shard's SHA-256

An example is found by a hash of all that the teacher sees of it, never by its place, so shuffling and
resuming are harmless. Using a cache that was made from anything else is an error that names what differs.
Classifiers, taggers and question answering store their logits; language models store sparse targets, whose
temperature is fixed when they are made.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compressor.console import note, steps
from compressor.distillation.forward import RowModel, TeacherRows
from compressor.distillation.fused import chunk_rows
from compressor.distillation.loop import batches, decoder_start
from compressor.distillation.losses import MASKED, forward_kl, softened
from compressor.distillation.sparse import SparseTargets, random_samples, sparse_forward_kl, top_k
from compressor.distillation.tasks import LANGUAGE_MODELS, Batch, Examples, TaskName, pad_rows
from compressor.errors import InputRefused, UsageError, VerificationFailed
from compressor.sources.tensors import file_sha256

SHARD_BYTES = 128 << 20
PROBE_TOLERANCE = 1e-3
"""Nats a row that cached and recomputed targets may be apart."""


@dataclass(frozen=True)
class Kind:
    """What is stored of a row: ``dense`` logits, the ``topk`` likeliest ids, or ``rs`` samples."""

    name: str
    count: int = 0

    def row_bytes(self, width: float) -> float:
        """Bytes of a row of ``width`` classes: fp32 logits; or id (4), log-probability (2) and, for samples, count (1)."""
        match self.name:
            case "topk":
                return 6 * min(self.count, width) + 4
            case "rs":
                return 7 * min(self.count, width)
        return 4 * width


def parse_kind(text: str, task: TaskName) -> Kind:
    """``topk:64`` or ``rs:24`` for language models; other tasks are always dense. Raises UsageError."""
    if task not in LANGUAGE_MODELS:
        return Kind("dense")
    name, _, count = text.partition(":")
    if name not in ("topk", "rs") or not count.isdigit() or not 1 <= int(count) <= 4096:
        raise UsageError(f"--cache-targets {text}: use topk:K or rs:K, such as topk:64 or rs:24")
    if name == "rs" and int(count) > 255:
        raise UsageError(f"--cache-targets {text}: at most 255 samples")
    return Kind(name, int(count))


@dataclass(frozen=True)
class Identity:
    """All that the targets depend on. A cache is stale as soon as one field differs."""

    teacher: str
    tokenizer: str
    data: str
    length: int
    task: str
    targets: str
    temperature: float | None
    vocabulary: int | None
    dtype: str
    seed: int | None


def tokenizer_digest(tokenizer: Any) -> str:
    """Over the vocabulary, the special tokens and the chat template."""
    facts: list[Any] = [
        sorted(tokenizer.get_vocab().items()),
        sorted(tokenizer.special_tokens_map.items(), key=str),
    ]
    facts.append(getattr(tokenizer, "chat_template", None))
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def weights_digest(files: Sequence[Path], config: dict[str, Any]) -> str:
    """Over the contents of a checkpoint's weight files and its config."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in files:
        digest.update(file_sha256(file).encode())
    return digest.hexdigest()


def predicted_bytes(kind: Kind, examples: Examples, width: int) -> int:
    """What the targets of ``examples`` take; ``width`` is the number of classes (unused by question answering)."""
    if examples.task == "question-answering":
        return sum(8 * example.length for example in examples.items)
    return int(sum(example.rows(examples.task) for example in examples.items) * kind.row_bytes(width))


def check_identity(directory: Path, identity: Identity) -> bool:
    """Whether there is a cache in ``directory``. Raises InputRefused naming the first field that makes it stale."""
    file = directory / "manifest.json"
    if not file.exists():
        if directory.exists() and any(directory.iterdir()):
            raise UsageError(f"{directory}: is not a cache of targets and not empty: choose another --cache")
        return False
    try:
        stored = json.loads(file.read_text("utf-8"))["identity"]
    except (ValueError, KeyError, OSError):
        raise InputRefused(f"{file}: cannot be read: remove the cache and make it again") from None
    for name, value in asdict(identity).items():
        if stored.get(name) != value:
            known = str(stored.get(name))[:16], str(value)[:16]
            raise InputRefused(
                f"{directory}: stale: its {name} is {known[0]} and this run's is {known[1]}: remove it or choose another --cache"
            )
    return True


@torch.no_grad()
def capture(
    directory: Path,
    identity: Identity,
    kind: Kind,
    model: RowModel,
    examples: Examples,
    *,
    pad_id: int,
    batch_size: int,
    vocabulary: int | None,
    temperature: float,
    width: int,
    seed: int,
) -> None:
    """Compute the targets of all ``examples``; finished shards of an earlier, killed run are kept.

    A shard appears whole or not at all. The samples of ``rs`` depend on the seed and the example only.
    """
    if not check_identity(directory, identity):
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / "manifest.json", {"identity": asdict(identity)})
    total = predicted_bytes(kind, examples, width)
    shards = max(1, -(-total // SHARD_BYTES))
    parts = np.array_split(np.arange(len(examples)), min(shards, len(examples)))
    missing = [(n, part) for n, part in enumerate(parts) if not _finished(directory, n)]
    if not missing:
        return
    if len(missing) < len(parts):
        note(f"{directory}: going on after {len(parts) - len(missing)} of {len(parts)} shards")
    device = next(model.bare.parameters()).device
    with steps("cache", sum(len(part) for _, part in missing)) as shown:
        for number, part in missing:
            subset = examples.subset(part.tolist(), examples.source)
            stored: dict[str, dict[str, Tensor]] = {}
            for ids, make in batches(
                subset, batch_size, pad_id=pad_id, decoder_start=decoder_start(model.bare)
            ):
                batch = make().to(device)
                rows = model(batch)
                at = 0
                for index, count in zip(ids, batch.counts, strict=True):
                    example = subset.items[index]
                    pieces = []
                    step = chunk_rows(vocabulary or width, device)
                    for start in range(at, at + count, step):
                        logits = rows.chunk_logits(start, min(start + step, at + count), vocabulary)
                        if examples.task == "question-answering":
                            logits = logits[:, : example.length]
                        pieces.append(_stored(kind, logits, temperature, seed, example.key, start - at))
                    stored[example.key] = {k: torch.cat([p[k] for p in pieces]) for k in pieces[0]}
                    at += count
                    shown.advance()
            _write_shard(directory, number, stored)


def _stored(
    kind: Kind, logits: Tensor, temperature: float, seed: int, key: str, offset: int
) -> dict[str, Tensor]:
    if kind.name == "dense":
        return {"logits": logits.cpu()}
    log_probs = softened(logits, temperature)
    if kind.name == "topk":
        sparse = top_k(log_probs, kind.count)
        rest = (1 - sparse.log_probs.exp().sum(-1)).clamp(min=0)
        return {"ids": sparse.ids.int().cpu(), "log_probs": sparse.log_probs.half().cpu(), "rest": rest.cpu()}
    generator = torch.Generator(device=logits.device).manual_seed(
        (int(key[:12], 16) + 1_000_003 * seed + offset) % 2**62
    )
    sparse = random_samples(log_probs, kind.count, generator)
    assert sparse.weights is not None
    fill = kind.count - sparse.ids.shape[-1]
    padded = [
        torch.nn.functional.pad(x, (0, fill)).cpu() for x in (sparse.ids, sparse.log_probs, sparse.weights)
    ]
    counts = (padded[2] * kind.count).round().to(torch.uint8)
    return {"ids": padded[0].int(), "log_probs": padded[1].half(), "counts": counts}


def _write_shard(directory: Path, number: int, stored: dict[str, dict[str, Tensor]]) -> None:
    names = list(next(iter(stored.values())))
    # Dense rows of question answering differ in width, so values lie flat; the index has their shapes.
    tensors = {n: torch.cat([part[n].reshape(-1) for part in stored.values()]) for n in names}
    index = {
        key: [part[names[0]].shape[0], part[names[0]].shape[-1] if part[names[0]].ndim > 1 else 1]
        for key, part in stored.items()
    }
    file = directory / f"shard-{number:05d}.safetensors"
    temporary = file.with_suffix(".new")
    save_file(tensors, temporary)
    os.replace(temporary, file)
    _write(file.with_suffix(".json"), {"sha256": file_sha256(file), "examples": index})


def _finished(directory: Path, number: int) -> bool:
    file = directory / f"shard-{number:05d}.safetensors"
    try:
        record = json.loads(file.with_suffix(".json").read_text("utf-8"))
        return bool(record["sha256"] == file_sha256(file))
    except (OSError, ValueError, KeyError):
        return False


def _write(file: Path, value: Any) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value) + "\n", "utf-8")
    os.replace(temporary, file)


@dataclass(frozen=True)
class _Place:
    shard: int
    first: int  # row
    value: int  # first value of its flat tensors
    rows: int
    width: int


class CachedTeacher:
    """Targets of a batch from a cache, in the same form as a live teacher's.

    Raises InputRefused when a shard is missing or damaged, or an example was never captured.
    """

    def __init__(self, directory: Path, identity: Identity, kind: Kind, examples: Examples) -> None:
        if not check_identity(directory, identity):
            raise InputRefused(f"{directory}: no cache of targets is there: make it with --cache-only")
        self._kind, self._task = kind, examples.task
        self.temperature = identity.temperature or 1.0
        self._files: list[dict[str, Tensor]] = []
        self._places: dict[str, _Place] = {}
        for number, record in enumerate(sorted(directory.glob("shard-*.json"))):
            file = record.with_suffix(".safetensors")
            described = json.loads(record.read_text("utf-8"))
            if not file.exists() or file_sha256(file) != described["sha256"]:
                raise InputRefused(f"{file}: damaged or missing: remove {record.name} and capture again")
            with safe_open(file, "pt") as stream:
                self._files.append({name: stream.get_tensor(name) for name in stream.keys()})  # noqa: SIM118
            first = value = 0
            for key, (rows, width) in described["examples"].items():
                self._places[key] = _Place(number, first, value, rows, width)
                first, value = first + rows, value + rows * width
        absent = sum(example.key not in self._places for example in examples.items)
        if absent:
            raise InputRefused(
                f"{directory}: incomplete: {absent} of {len(examples)} examples are missing: run the capture to its end"
            )

    def __call__(self, batch: Batch, *, hidden_states: bool = False) -> TeacherRows:
        """Targets of ``batch`` on its device."""
        device = batch.labels.device
        places = [self._places[key] for key in batch.keys]
        if self._kind.name == "dense":
            logits = pad_rows([self._read(p, "logits", p.width) for p in places]).to(device)
            if self._task in ("multi-label", "regression"):
                return TeacherRows(logits=logits)
            width = batch.inputs["input_ids"].shape[1]
            if self._task == "question-answering" and logits.shape[-1] < width:
                logits = torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=MASKED)
            log_probs = softened(logits, self.temperature)
            return TeacherRows(targets=lambda start, stop: log_probs[start:stop])
        sparse = self.sparse(batch)
        return TeacherRows(targets=lambda start, stop: sparse[start:stop])

    def sparse(self, batch: Batch) -> SparseTargets:
        """The sparse targets of all rows of ``batch``."""
        device = batch.labels.device
        places = [self._places[key] for key in batch.keys]
        ids = torch.cat([self._read(p, "ids", p.width) for p in places]).long().to(device)
        log_probs = torch.cat([self._read(p, "log_probs", p.width) for p in places]).float().to(device)
        if self._kind.name == "rs":
            counts = torch.cat([self._read(p, "counts", p.width) for p in places])
            return SparseTargets(ids, log_probs, counts.float().to(device) / self._kind.count)
        rest = torch.cat([self._files[p.shard]["rest"][p.first : p.first + p.rows] for p in places]).to(
            device
        )
        # Rounding to fp16 moves the sum of the kept; the rest was stored exactly.
        kept = (1 - rest).clamp(min=1e-6).log() - log_probs.logsumexp(-1)
        return SparseTargets(ids, log_probs + kept[:, None])

    def _read(self, place: _Place, name: str, width: int) -> Tensor:
        flat = self._files[place.shard][name]
        return flat[place.value : place.value + place.rows * width].reshape(place.rows, width)


@torch.no_grad()
def probe(
    cached: CachedTeacher,
    model: RowModel,
    examples: Examples,
    *,
    pad_id: int,
    vocabulary: int | None,
    temperature: float,
    seed: int,
    count: int = 8,
) -> float:
    """Recompute ``count`` random examples and return the mean |KL(cached ‖ live)| over their rows, in nats.

    Raises VerificationFailed when it is above ``PROBE_TOLERANCE``: then the teacher is not the one that
    was captured, or its numerics are.
    """
    chosen = np.random.default_rng([seed, 2]).permutation(len(examples))[:count]
    sample = examples.subset(chosen.tolist(), "probe")
    device = next(model.bare.parameters()).device
    total, rows = 0.0, 0
    for _, make in batches(sample, count, pad_id=pad_id, decoder_start=decoder_start(model.bare)):
        batch = make().to(device)
        live = model(batch)
        stored = cached(batch)
        step = chunk_rows(vocabulary or 1024, device)
        for start in range(0, len(batch.labels), step):
            stop = min(start + step, len(batch.labels))
            logits = live.chunk_logits(start, stop, vocabulary)
            if stored.logits is not None:
                difference = (logits - stored.logits[start:stop]).abs().mean(-1)
            else:
                assert stored.targets is not None
                target = stored.targets(start, stop)
                log_probs = softened(logits, temperature)
                if isinstance(target, SparseTargets):
                    difference = sparse_forward_kl(log_probs, target)
                else:
                    difference = forward_kl(log_probs, target)
            total += float(difference.abs().double().sum())
            rows += stop - start
    distance = total / max(rows, 1)
    if not distance <= PROBE_TOLERANCE:
        raise VerificationFailed(
            f"the cache is {distance:.2e} nats a row from the teacher recomputed on {count} examples: capture it again"
        )
    return distance
