"""Losses on the inside of the models: hidden states and attention relations, by a map between their layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compressor.distillation.derive import stacks_of
from compressor.distillation.forward import Rows, TeacherRows
from compressor.distillation.loop import InnerLoss
from compressor.distillation.losses import hidden_mse, relation_kl
from compressor.distillation.tasks import Batch
from compressor.errors import UsageError

_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))


def even_map(student: int, teacher: int) -> list[int]:
    """The teacher layer that each student layer imitates when nothing better is known: spread out, last to last."""
    return [round((i + 1) * teacher / student) - 1 for i in range(student)]


def make_inner_loss(
    student: Any,
    teacher: Any,
    *,
    hidden: float,
    relations: float,
    layer_map: Sequence[int] | None,
    causal: bool,
) -> InnerLoss | None:
    """``hidden`` · MSE of the outputs of mapped layers, a mean over layers, plus ``relations`` · KL of the q, k and
    v relations of the last mapped layer, a mean over the three (MiniLMv2); None when both weights are 0.

    ``layer_map`` gives the teacher layer of each student layer; a derived student has one by birth.
    Raises UsageError for hidden sizes that differ or attention whose projections are fused.
    """
    if not hidden and not relations:
        return None
    (mine,), (theirs,) = stacks_of(student), stacks_of(teacher)
    mapped = list(layer_map) if layer_map is not None else even_map(mine.layers, theirs.layers)
    widths = [m.config.get_text_config().hidden_size for m in (student, teacher)]
    if hidden and widths[0] != widths[1]:
        raise UsageError(f"--hidden: hidden sizes {widths[0]} and {widths[1]} differ: use --relations")
    caught: dict[str, list[Tensor]] = {"student": [], "teacher": []}
    heads = 0
    if relations:
        heads = teacher.config.get_text_config().num_attention_heads
        for name, model, path in (
            ("student", student, f"{mine.path}.{mine.layers - 1}"),
            ("teacher", teacher, f"{theirs.path}.{mapped[-1]}"),
        ):
            for projection in _projections(model.get_submodule(path)):
                projection.register_forward_hook(_catcher(caught[name]))
        for model in (student, teacher):
            for projection, path in (
                (p, f"{s.path}.{s.layers - 1}") for s in stacks_of(model) for p in _projections(model.get_submodule(f"{s.path}.{s.layers - 1}"))
            ):  # fmt: skip
                if projection.out_features % heads:
                    raise UsageError(
                        f"--relations: {path} is {projection.out_features} wide, no multiple of {heads} heads"
                    )

    def loss(said: Rows, targets: TeacherRows, batch: Batch) -> Tensor:
        mask = batch.inputs.get("attention_mask")
        ids = batch.inputs["input_ids"]
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        total = torch.zeros((), device=ids.device)
        if hidden:
            for index, at in enumerate(mapped):
                target = targets.output.hidden_states[at + 1].to(ids.device)
                rows = hidden_mse(said.output.hidden_states[index + 1][real], target[real])
                total = total + hidden * rows.sum() / len(mapped)
        if relations:
            for s, t in zip(caught["student"], caught["teacher"], strict=True):
                total = total + relations * relation_kl(s, t.to(ids.device), real, heads, causal).sum() / 3
            caught["student"].clear()
            caught["teacher"].clear()
        return total

    return loss


def _projections(layer: nn.Module) -> list[Any]:
    by_leaf = {name.rpartition(".")[2]: module for name, module in layer.named_modules()}
    for names in _PROJECTIONS:
        if all(name in by_leaf for name in names):
            return [by_leaf[name] for name in names]
    raise UsageError(f"--relations: {type(layer).__name__} has no separate query, key and value projections")


def _catcher(into: list[Tensor]) -> Any:
    def hook(_: nn.Module, __: Any, output: Tensor) -> None:
        if len(into) >= 3:  # what an evaluation left behind
            into.clear()
        into.append(output)

    return hook
