"""One forward pass, as far as the rows that are supervised: hidden states before the output head, or logits.

For a language model the head is left to :mod:`compressor.distillation.fused`. How a model arrives at its
head differs (a transform in BERT, a factor in T5), so the head's input is caught on its way in, and the
head itself only sees one position.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressor.distillation.fused import Head, Objective, Sums, Targets, head_loss, logits_loss
from compressor.distillation.losses import binary_divergence
from compressor.distillation.tasks import LANGUAGE_MODELS, Batch, TaskName, logit_rows


@dataclass(frozen=True)
class Rows:
    """What a model says of a batch's rows: ``hidden`` [N, H] with the ``head`` to apply, or ``logits`` [N, C].

    ``output`` is what the model returned, for losses on its inside.
    """

    hidden: Tensor | None
    head: Head | None
    logits: Tensor | None
    output: Any

    def chunk_logits(self, start: int, stop: int, vocabulary: int | None) -> Tensor:
        """fp32 logits of some rows, for the first ``vocabulary`` classes."""
        if self.head is not None and self.hidden is not None:
            return self.head.logits(self.hidden[start:stop], vocabulary)
        assert self.logits is not None
        return self.logits[start:stop, :vocabulary].float()


class RowModel:
    """A model with a task. ``fused``: its head can be applied by us (see :func:`head_matches`).

    ``order`` [C] puts the model's classes in the order of the data's labels. ``module`` is what is called,
    a distributed wrapper included; ``bare`` is the transformers model in it.
    """

    def __init__(
        self, module: nn.Module, bare: Any, task: TaskName, *, fused: bool, order: Tensor | None = None
    ) -> None:
        self.module, self.bare, self.task = module, bare, task
        self.fused, self.order = fused, order

    def __call__(self, batch: Batch, *, hidden_states: bool = False) -> Rows:
        inputs: dict[str, Any] = {**batch.inputs, "return_dict": True}
        if self.task == "causal-lm":
            inputs["use_cache"] = False  # with a cache, several sequences in one row would see each other
        if hidden_states:
            inputs["output_hidden_states"] = True
        if not self.fused:
            output = self.module(**inputs)
            logits = logit_rows(self.task, output, batch)
            return Rows(None, None, logits if self.order is None else logits[:, self.order], output)
        assert batch.where is not None
        layer = self.bare.get_output_embeddings()
        with _caught_input(layer, batch.where) as caught:
            output = self.module(**inputs)
        return Rows(caught[0], head_of(self.bare), None, output)


@contextmanager
def _caught_input(layer: nn.Module, where: Tensor) -> Iterator[list[Tensor]]:
    caught: list[Tensor] = []

    def catch(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = inputs[0]
        caught.append(hidden[where])
        return hidden[:, :1], *inputs[1:]

    handle = layer.register_forward_pre_hook(catch)
    try:
        yield caught
    finally:
        handle.remove()


def head_of(model: Any) -> Head | None:
    """The model's output head, or None if it is no plain linear layer (quantized, LoRA, several codebooks)."""
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear or not layer.weight.is_floating_point():
        return None
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(layer.weight, layer.bias, scale / divisor, getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def head_matches(model: Any, task: TaskName, batch: Batch) -> bool:
    """Whether :class:`Head` on the caught input gives the model's own logits, tried on ``batch``.

    Custom factors, biases added later or wrapped heads make it false; then logits are taken as they are.
    """
    if task not in LANGUAGE_MODELS:
        return False
    head = head_of(model)
    if head is None or batch.where is None:
        return False
    try:
        caught = RowModel(model, model, task, fused=True)(batch)
        own = RowModel(model, model, task, fused=False)(batch).logits
    except (RuntimeError, IndexError, TypeError):
        return False
    assert own is not None
    assert caught.hidden is not None
    mine = head.logits(caught.hidden)
    if mine.shape != own.shape:
        return False
    tolerance = 1e-4 if own.dtype == torch.float32 else 2e-2
    return bool((mine - own.float()).abs().max() <= tolerance * own.float().abs().max().clamp(min=1.0))


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's side of a batch: ``targets`` for tasks with distributions over classes, ``logits`` [N, C]
    for multi-label and regression. ``output`` is the live teacher's."""

    targets: Targets | None = None
    logits: Tensor | None = None
    output: Any = None


def row_loss(
    task: TaskName,
    student: Rows,
    labels: Tensor,
    teacher: TeacherRows | None,
    objective: Objective,
    vocabulary: int | None = None,
) -> Sums:
    """(1 − α) · supervised loss + α · distillation loss, summed over the batch's rows.

    Multi-label: both are means over the labels of a row. Regression: squared errors to the label and to the
    teacher's value; a temperature has no meaning there.
    """
    if task in ("multi-label", "regression"):
        assert student.logits is not None
        logits = student.logits.float()
        if task == "regression":
            ce = (logits - labels).square().mean(-1).sum()
        else:
            ce = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1).sum()
        kd = torch.zeros_like(ce)
        if teacher is not None and teacher.logits is not None:
            if task == "regression":
                kd = (logits - teacher.logits.float()).square().mean(-1).sum()
            else:
                rows = binary_divergence(objective.kind, logits, teacher.logits, objective.temperature)
                kd = objective.temperature**2 * rows.sum()
        return Sums((1 - objective.alpha) * ce + objective.alpha * kd, kd.detach(), ce.detach())
    targets = None if teacher is None else teacher.targets
    if student.head is not None and student.hidden is not None:
        return head_loss(student.hidden, student.head, labels, targets, objective, vocabulary=vocabulary)
    assert student.logits is not None
    return logits_loss(student.logits[:, :vocabulary], labels, targets, objective)
