"""Loss of an output head over a big vocabulary, without ever holding [rows, V] logits.

The rows are cut into chunks. A chunk's logits are made, turned into its loss and the loss's gradient, and
that gradient is at once taken through the head to the hidden state and the weight, as in Liger
(arXiv 2410.10989). Alive at a time are a few [chunk, V] buffers and the weight's gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.distillation.losses import Divergence, divergence, forward_kl
from compressor.distillation.sparse import SparseTargets, sparse_forward_kl

# Logits in a buffer: 12 MiB on a processor, near its cache; 256 MiB keeps a GPU busy.
_CHUNK, _GPU_CHUNK = 3 << 20, 1 << 26


@dataclass(frozen=True)
class Head:
    """An output layer: logits = scale · (h Wᵀ + b), then softcap · tanh(logits / softcap).

    ``weight`` [V, H] and ``bias`` [V]. ``scale`` is Cohere's ``logit_scale`` or the inverse of Granite's
    ``logits_scaling``; ``softcap`` is Gemma's ``final_logit_softcapping``.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor, vocabulary: int | None = None) -> Tensor:
        """[N, V] in fp32, for the first ``vocabulary`` ids, from ``hidden`` [N, H]."""
        bias = None if self.bias is None else self.bias[:vocabulary]
        return self.finished(F.linear(hidden.to(self.weight.dtype), self.weight[:vocabulary], bias))

    def finished(self, products: Tensor) -> Tensor:
        """The logits from h Wᵀ + b."""
        logits = products.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Gradient with respect to h Wᵀ + b, from that with respect to ``logits``."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits / self.softcap).square())
        return gradient * self.scale if self.scale != 1.0 else gradient


@dataclass(frozen=True)
class Objective:
    """(1 − α) · cross-entropy + α · T² · divergence at temperature T."""

    kind: Divergence = "fkl"
    temperature: float = 1.0
    alpha: float = 1.0


@dataclass(frozen=True)
class Sums:
    """Sums over rows: ``total`` carries the gradient; ``kd`` is T² · divergence and ``ce`` the cross-entropy."""

    total: Tensor
    kd: Tensor
    ce: Tensor


Targets = Callable[[int, int], Tensor | SparseTargets]
"""The teacher at temperature T on rows start … stop: log-probabilities, fp32 [n, V], or a sparse form of them."""


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Rows of a chunk on this kind of device."""
    return max(1, (_CHUNK if device.type == "cpu" else _GPU_CHUNK) // vocabulary)


def head_loss(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    teacher: Targets | None,
    objective: Objective,
    *,
    vocabulary: int | None = None,
    chunk: int | None = None,
) -> Sums:
    """The loss of all rows from ``hidden`` [N, H], ``labels`` [N] (ids) and the teacher's targets.

    Without a ``teacher`` (α = 0) the loss is cross-entropy alone; sparse targets take the forward KL only. ``vocabulary`` cuts both models to their first ids; ``chunk`` is in
    rows. Ties to the input embedding need no care: autograd adds up the weight's two gradients.
    """
    vocabulary = vocabulary or head.weight.shape[0]
    chunk = chunk or chunk_rows(vocabulary, hidden.device)
    total, kd, ce = _HeadLoss.apply(
        hidden, head.weight, head.bias, head, labels, teacher, objective, vocabulary, chunk
    )
    return Sums(total, kd, ce)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        labels: Tensor,
        teacher: Targets | None,
        objective: Objective,
        vocabulary: int,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs = needs_hidden or needs_weight or needs_bias
        d_hidden = torch.zeros_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None
        kd = hidden.new_zeros((), dtype=torch.float32)
        ce = torch.zeros_like(kd)
        cut = weight[:vocabulary]
        for start in range(0, len(hidden), chunk):
            stop = min(start + chunk, len(hidden))
            part = hidden[start:stop]
            logits = head.logits(part, vocabulary)
            kd_part, ce_part, gradient = _loss_and_gradient(
                logits, labels[start:stop], teacher, start, stop, objective, needs
            )
            kd += kd_part
            ce += ce_part
            if gradient is None:
                continue
            gradient = head.backward(gradient, logits)
            del logits
            if d_bias is not None:
                d_bias[:vocabulary] += gradient.sum(0)
            gradient = gradient.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[start:stop] = gradient @ cut
            if d_weight is not None:
                if weight.dtype == torch.float32:
                    d_weight[:vocabulary].addmm_(gradient.T, part.to(weight.dtype))
                else:
                    d_weight[:vocabulary] += gradient.T @ part.to(weight.dtype)
        ctx.d_hidden = d_hidden
        ctx.d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        ctx.d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        total = (1 - objective.alpha) * ce + objective.alpha * kd
        ctx.mark_non_differentiable(kd, ce)
        return total, kd, ce

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Any, ...]:
        gradients = [ctx.d_hidden, ctx.d_weight, ctx.d_bias]
        ctx.d_hidden = ctx.d_weight = ctx.d_bias = None
        return (*(None if g is None else g.mul_(scale.to(g.dtype)) for g in gradients), *[None] * 6)


def logits_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Targets | None,
    objective: Objective,
    *,
    chunk: int | None = None,
) -> Sums:
    """The same loss from the student's ``logits`` [N, V], for heads that are not a plain linear layer.

    The student's logits are held once; fp32 copies, and the teacher's side, exist a chunk at a time.
    """
    chunk = chunk or chunk_rows(logits.shape[-1], logits.device)
    total, kd, ce = _LogitsLoss.apply(logits, labels, teacher, objective, chunk)
    return Sums(total, kd, ce)


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        teacher: Targets | None,
        objective: Objective,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = ctx.needs_input_grad[0]
        gradients = torch.empty_like(logits) if needs else None
        kd = logits.new_zeros((), dtype=torch.float32)
        ce = torch.zeros_like(kd)
        for start in range(0, len(logits), chunk):
            stop = min(start + chunk, len(logits))
            kd_part, ce_part, gradient = _loss_and_gradient(
                logits[start:stop].float(), labels[start:stop], teacher, start, stop, objective, needs
            )
            kd += kd_part
            ce += ce_part
            if gradients is not None and gradient is not None:
                gradients[start:stop] = gradient
        ctx.gradients = gradients
        ctx.mark_non_differentiable(kd, ce)
        return (1 - objective.alpha) * ce + objective.alpha * kd, kd, ce

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return gradients.mul_(scale.to(gradients.dtype)), *[None] * 4


def _loss_and_gradient(
    logits: Tensor,
    labels: Tensor,
    teacher: Targets | None,
    start: int,
    stop: int,
    objective: Objective,
    needs: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """T² · divergence and cross-entropy, summed over the chunk, and the objective's gradient at ``logits``.

    Cross-entropy: ∂/∂z = p − 1[label], nothing for rows with a negative label. Forward KL at T: T² · ∂/∂z =
    T (p_s − p_t). The other divergences are differentiated by autograd within the chunk.
    """
    temperature, alpha = objective.temperature, objective.alpha
    plain = F.log_softmax(logits, dim=-1)
    known, at_label = (labels >= 0)[:, None], labels.clamp(min=0)[:, None]
    ce = -(plain.gather(-1, at_label) * known).sum()
    student = plain if temperature == 1.0 else F.log_softmax(logits / temperature, dim=-1)
    gradient: Tensor | None = None
    kd = torch.zeros_like(ce)
    target = teacher(start, stop) if teacher is not None else None
    if isinstance(target, Tensor) and objective.kind == "fkl":
        kd = temperature**2 * forward_kl(student, target).sum()
        if needs and alpha:
            gradient = student.exp().sub_(target.exp()).mul_(alpha * temperature)
    elif target is not None:
        leaf = student.detach().requires_grad_(needs)
        with torch.enable_grad():
            if isinstance(target, SparseTargets):
                rows = sparse_forward_kl(leaf, target)
            else:
                rows = divergence(objective.kind, leaf, target)
            value = temperature**2 * rows.sum()
        kd = value.detach()
        if needs and alpha:
            (upstream,) = torch.autograd.grad(value, leaf)
            # Through log softmax: g − p Σ g, and the 1/T of z / T.
            upstream = upstream - student.exp() * upstream.sum(-1, keepdim=True)
            gradient = upstream.mul_(alpha / temperature)
    if needs and alpha != 1.0:
        at_ce = plain.exp_()
        at_ce.scatter_add_(-1, at_label, at_ce.new_full((len(labels), 1), -1.0))
        weight = (1 - alpha) * known
        gradient = at_ce.mul_(weight) if gradient is None else gradient.addcmul_(at_ce, weight)
    if needs and gradient is None:
        gradient = torch.zeros_like(logits)
    return kd, ce, gradient
