"""The training loop. Read :func:`train` from top to bottom: batch, teacher, loss, step, evaluate, save.

Exact by construction. An optimizer step is one set of examples, fixed by the seed and the step's number;
how it is cut into micro-batches and spread over processes only changes the order of additions. Losses are
sums over the step's rows divided by their number over all processes. A killed run goes on from its last
checkpoint with the same parameters, moments and random states, so it ends in the same bytes on a CPU.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from compressor.console import note, steps
from compressor.distillation.forward import RowModel, Rows, TeacherRows, row_loss
from compressor.distillation.fused import Objective
from compressor.distillation.tasks import Batch, Example, Examples, collate
from compressor.errors import InputRefused, UsageError

EVALUATE_AT = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares of the training after which the student is measured: most of what distillation recovers comes early."""


@dataclass(frozen=True)
class Training:
    """How to train. ``batch_size`` examples make an optimizer step, over all processes; ``micro_batch`` go
    through the model at a time. ``steps`` or ``seconds`` end it. ``save_every`` steps a checkpoint is written
    (besides those at evaluations). ``dropout`` keeps the model's own dropout on."""

    steps: int | None
    seconds: float | None
    batch_size: int
    micro_batch: int
    learning_rate: float
    schedule: str = "cosine"
    warmup: float = 0.05
    final_learning_rate: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    optimizer: str = "adamw"
    dropout: bool = False
    save_every: int | None = None
    seed: int = 0


class Teacher(Protocol):
    """Gives the targets of a batch; live or from a cache."""

    def __call__(self, batch: Batch, *, hidden_states: bool = False) -> TeacherRows: ...


InnerLoss = Callable[[Rows, TeacherRows, Batch], Tensor]
"""Sum over a batch's real tokens of a loss on hidden states or attention, already weighted."""


@dataclass(frozen=True)
class Point:
    """The student after ``step`` steps; losses are means per row since the point before."""

    step: int
    seconds: float
    metric: float
    learning_rate: float = 0.0
    loss: float | None = None
    kd: float | None = None
    ce: float | None = None


@dataclass
class Progress:
    """Where a run is. ``best`` is by the task's metric; ``rows`` have been supervised so far."""

    step: int = 0
    seconds: float = 0.0
    rows: int = 0
    best_step: int = 0
    best_metric: float | None = None
    curve: list[Point] = field(default_factory=list)
    evaluated: int = 0  # how many of EVALUATE_AT are done


def train(
    student: Any,
    teacher: Teacher | None,
    examples: Examples,
    objective: Objective,
    training: Training,
    *,
    accelerator: Accelerator,
    directory: Path,
    pad_id: int,
    make_rows: Callable[[nn.Module], RowModel],
    evaluate: Callable[[RowModel], float],
    better: Callable[[float, float], bool],
    save_student: Callable[[Any, Path, dict[str, Tensor]], None],
    inner_loss: InnerLoss | None = None,
    vocabulary: int | None = None,
    log: Callable[[dict[str, float], int], None] = lambda values, step: None,
    label: str = "distill",
) -> Progress:
    """Train ``student`` in place and leave it with its best parameters, by ``evaluate`` and ``better``.

    Everything is kept in ``directory``: ``checkpoints/`` (the last one, with its ``state/``) and ``best/``, both
    as ``save_student`` writes them. If there is a checkpoint, training goes on from it. ``make_rows`` wraps
    the prepared model.

    Raises InputRefused when the loss stops being finite, UsageError for batches that cannot be shared out.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    if training.batch_size % world:
        raise UsageError(f"--batch-size {training.batch_size} cannot be shared equally by {world} processes")
    if training.batch_size > len(examples):
        raise UsageError(
            f"--batch-size {training.batch_size} is more than the {len(examples)} training examples"
        )
    student.train(training.dropout)
    start_id = decoder_start(student)
    optimizer = make_optimizer(student, training)
    model, optimizer = accelerator.prepare(student, optimizer)
    model.train(training.dropout)
    rows_model = make_rows(model)
    progress = _resume(accelerator, directory) or Progress()
    order = Order(len(examples), training.batch_size, training.seed)
    counts = np.array([example.rows(examples.task) for example in examples.items])
    lengths = np.array([example.length for example in examples.items])

    def measure() -> None:
        model.eval()
        metric = evaluate(rows_model)
        model.train(training.dropout)
        since = max(logged["rows"], 1)
        known = progress.step > 0 and logged["rows"] > 0
        point = Point(
            progress.step, progress.seconds, metric, optimizer.param_groups[0]["lr"],
            *(float(logged[name]) / since if known else None for name in ("loss", "kd", "ce")),
        )  # fmt: skip
        logged.update(dict.fromkeys(logged, 0.0))
        progress.curve.append(point)
        if math.isfinite(metric) and (progress.best_metric is None or better(metric, progress.best_metric)):
            progress.best_metric, progress.best_step = metric, progress.step
            _save(accelerator, model, directory / "best", save_student)
        values = {k: v for k, v in asdict(point).items() if v is not None and k not in ("step", "seconds")}
        log({f"{label}/{name}": value for name, value in values.items()}, progress.step)

    logged: dict[str, float] = {"loss": 0.0, "kd": 0.0, "ce": 0.0, "rows": 0.0}
    began = time.monotonic() - progress.seconds
    if progress.step == 0 and not progress.curve:
        measure()
        began = time.monotonic()  # the budget is for training
    with steps(label, training.steps) as shown:
        while (done := _done(progress, training)) < 1.0:
            ids = order.batch(progress.step)
            rows, tokens = int(counts[ids].sum()), int(lengths[ids].sum())
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(done, training)
            sums = torch.zeros(3, device=accelerator.device)
            micro_batches = shares(ids[rank::world], lengths, training.micro_batch)
            for number, micro in enumerate(micro_batches):
                batch = collate(
                    examples.task, [examples.items[i] for i in micro], pad_id=pad_id, decoder_start=start_id
                )
                batch = batch.to(accelerator.device)
                last = number == len(micro_batches) - 1
                with _no_sync(accelerator, model, last), accelerator.autocast():
                    targets = teacher(batch, hidden_states=inner_loss is not None) if teacher else None
                    said = rows_model(batch, hidden_states=inner_loss is not None)
                    parts = row_loss(examples.task, said, batch.labels, targets, objective, vocabulary)
                    loss = parts.total / rows
                    if inner_loss is not None and targets is not None:
                        loss = loss + inner_loss(said, targets, batch) / tokens
                    # Distributed training averages gradients over processes; the sum is wanted.
                    accelerator.backward(loss * world)
                sums += torch.stack([loss.detach() * rows, parts.kd, parts.ce])
            norm = accelerator.clip_grad_norm_(model.parameters(), training.clip)
            if norm is not None and not math.isfinite(float(norm)):
                raise InputRefused(
                    f"the gradient is not finite at step {progress.step}: lower --learning-rate or use --dtype float32"
                )
            optimizer.step()
            optimizer.zero_grad()
            if world > 1:
                sums = accelerator.reduce(sums, "sum")
            for name, value in zip(("loss", "kd", "ce"), sums.tolist(), strict=True):
                logged[name] += value
            logged["rows"] += rows
            progress.step += 1
            progress.rows += rows
            progress.seconds = time.monotonic() - began
            if world > 1 and training.seconds is not None:
                progress.seconds = _agreed(progress.seconds, accelerator)
            shown.advance(f"loss {sums[0].item() / rows:.4f}")
            log({f"{label}/step_loss": sums[0].item() / rows}, progress.step)
            if _due(progress, training):
                measure()
                began = time.monotonic() - progress.seconds  # measuring is not training
                _checkpoint(accelerator, model, directory, progress, save_student)
            elif training.save_every and progress.step % training.save_every == 0:
                _checkpoint(accelerator, model, directory, progress, save_student)
    accelerator.wait_for_everyone()
    return progress


class Order:
    """The examples of every step: shuffled epochs end to end, cut into full batches."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self._count, self._batch, self._seed = count, batch_size, seed
        self._epochs: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> np.ndarray:
        """Indices of the examples of ``step``, from its number alone."""
        positions = np.arange(step * self._batch, (step + 1) * self._batch)
        epochs = positions // self._count
        self._epochs = {epoch: self._epoch(epoch) for epoch in np.unique(epochs).tolist()}
        return np.array(
            [self._epochs[e][p % self._count] for e, p in zip(epochs.tolist(), positions, strict=True)]
        )

    def _epoch(self, epoch: int) -> np.ndarray:
        known = self._epochs.get(epoch)
        if known is not None:
            return known
        return np.random.default_rng([self._seed, epoch]).permutation(self._count)


def shares(ids: np.ndarray, lengths: np.ndarray, micro_batch: int) -> list[list[int]]:
    """Cut a step into micro-batches of similar lengths, so that little is padding."""
    by_length = ids[np.argsort(-lengths[ids], kind="stable")]
    return [by_length[at : at + micro_batch].tolist() for at in range(0, len(by_length), micro_batch)]


def learning_rate(done: float, training: Training) -> float:
    """Linear warm-up, then cosine or linear decay to ``final_learning_rate`` of the peak; ``done`` is in [0, 1].

    The first step of a warm-up must move too, so it starts at a hundredth of the peak.
    """
    peak, low = training.learning_rate, training.final_learning_rate
    if done < training.warmup:
        return peak * max(0.01, done / training.warmup)
    at = (done - training.warmup) / max(1e-9, 1 - training.warmup)
    match training.schedule:
        case "cosine":
            return peak * (low + (1 - low) * (1 + math.cos(math.pi * min(1.0, at))) / 2)
        case "linear":
            return peak * (1 - (1 - low) * min(1.0, at))
        case "constant":
            return peak
    raise UsageError(f"schedule {training.schedule}: choose cosine, linear or constant")


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019), 32-bit, or 8-bit through bitsandbytes. Vectors are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if training.optimizer == "adamw8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(groups, lr=training.learning_rate)
    return torch.optim.AdamW(groups, lr=training.learning_rate, fused=True)


def decoder_start(model: Any) -> int:
    """The id that seq2seq targets are shifted in with."""
    config = model.config
    start = getattr(config, "decoder_start_token_id", None)
    return int(start if start is not None else getattr(config, "pad_token_id", None) or 0)


def _done(progress: Progress, training: Training) -> float:
    shares_done = [0.0]
    if training.steps is not None:
        shares_done.append(progress.step / training.steps)
    if training.seconds is not None:
        shares_done.append(progress.seconds / training.seconds)
    return max(shares_done)


def _agreed(seconds: float, accelerator: Accelerator) -> float:
    """The first process's time: all have to stop, and to measure, at the same step."""
    return float(broadcast(torch.tensor([seconds], dtype=torch.float64, device=accelerator.device))[0])


def _due(progress: Progress, training: Training) -> bool:
    done = _done(progress, training)
    passed = sum(done >= at for at in EVALUATE_AT)
    due = passed > progress.evaluated
    progress.evaluated = passed
    return due


def _no_sync(accelerator: Accelerator, model: nn.Module, last: bool) -> Any:
    """Gradients travel between processes once a step, with the last micro-batch."""
    from contextlib import nullcontext

    return nullcontext() if last else accelerator.no_sync(model)


def _save(accelerator: Accelerator, model: Any, directory: Path, save_student: Callable[..., None]) -> None:
    """Write the student, complete or not at all."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        temporary = directory.with_name(f".{directory.name}.new")
        shutil.rmtree(temporary, ignore_errors=True)
        save_student(accelerator.unwrap_model(model), temporary, state)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    accelerator.wait_for_everyone()


def _checkpoint(
    accelerator: Accelerator,
    model: Any,
    directory: Path,
    progress: Progress,
    save_student: Callable[..., None],
) -> None:
    """``checkpoints/step-N``: the student and, in ``state/``, what is needed to go on exactly."""
    folder = directory / "checkpoints"
    temporary, final = folder / ".new", folder / f"step-{progress.step:07d}"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        save_student(accelerator.unwrap_model(model), temporary, state)
        (temporary / "state").mkdir()  # sharded states are written into it before accelerate makes it
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary / "state"))
    accelerator.wait_for_everyone()  # each process writes its random state there; only then is it renamed
    if accelerator.is_main_process:
        (temporary / "state" / "progress.json").write_text(json.dumps(asdict(progress)), "utf-8")
        older = list(folder.glob("step-*"))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for path in older:
            if path != final:
                shutil.rmtree(path)
    accelerator.wait_for_everyone()


def _resume(accelerator: Accelerator, directory: Path) -> Progress | None:
    found = sorted((directory / "checkpoints").glob("step-*/state/progress.json"))
    if not found:
        return None
    state = found[-1].parent
    stored = json.loads((state / "progress.json").read_text("utf-8"))
    accelerator.load_state(str(state))
    note(f"{directory.name}: going on after step {stored['step']}")
    stored["curve"] = [Point(**point) for point in stored["curve"]]
    return Progress(**stored)


def batches(
    examples: Examples, batch_size: int, *, pad_id: int, decoder_start: int
) -> list[tuple[Sequence[int], Callable[[], Batch]]]:
    """All examples once, of similar lengths together: (indices, what makes the batch)."""
    lengths = np.array([example.length for example in examples.items])

    def maker(indices: Sequence[int]) -> Callable[[], Batch]:
        chosen: list[Example] = [examples.items[i] for i in indices]
        return lambda: collate(examples.task, chosen, pad_id=pad_id, decoder_start=decoder_start)

    return [(ids, maker(ids)) for ids in shares(np.arange(len(examples)), lengths, batch_size)]
