"""The formulas of distillation. Each takes fp32 tensors and gives one value per row, never a mean.

Rows are what is supervised: a token of a language model, a sentence of a classifier, a start or end of an
answer. Callers sum over rows and divide by the number of rows of the whole optimizer step, over all
micro-batches and processes, so that no result depends on padding, packing or how a batch is split.
Divergences take log-probabilities that were computed at the temperature T; their sum is multiplied by T²
(Hinton et al. 2015, arXiv 1503.02531), which keeps gradients of the same size at any temperature.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Divergence = Literal["fkl", "rkl", "jsd", "skl", "srkl"]
DIVERGENCES = get_args(Divergence)
SKEW = 0.1  # DistiLLM's base value
MASKED = -1e30
"""Logit of a class that does not exist. Finite, so that 0 · (log 0 − log 0) is 0 and not NaN."""


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p_t ‖ p_s) = Σ_v p_t (log p_t − log p_s) from log-probabilities [N, V]; [N], in nats."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p_s ‖ p_t) from log-probabilities [N, V]; [N], in nats."""
    return forward_kl(teacher, student)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """β KL(p_t ‖ m) + (1−β) KL(p_s ‖ m), m = β p_t + (1−β) p_s (Agarwal et al. 2023, arXiv 2306.13649); [N].

    It tends to 0 at both ends of β: unlike in TRL, β = 0 does not turn into the forward KL.
    """
    mixture = _mixture(teacher, student, beta)
    return beta * forward_kl(mixture, teacher) + (1 - beta) * forward_kl(mixture, student)


def skew_kl(student: Tensor, teacher: Tensor, skew: float = SKEW) -> Tensor:
    """KL(p_t ‖ λ p_t + (1−λ) p_s) (DistiLLM, Ko et al. 2024, arXiv 2402.03898); [N]."""
    return forward_kl(_mixture(teacher, student, skew), teacher)


def skew_reverse_kl(student: Tensor, teacher: Tensor, skew: float = SKEW) -> Tensor:
    """KL(p_s ‖ (1−λ) p_t + λ p_s) (DistiLLM); [N]."""
    return forward_kl(_mixture(student, teacher, skew), student)


def _mixture(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """log(weight · first + (1 − weight) · second), without leaving log space: probabilities underflow."""
    log_weight = first.new_tensor([weight, 1 - weight]).log()
    return torch.logaddexp(first + log_weight[0], second + log_weight[1])


def divergence(kind: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence called ``kind`` from log-probabilities [N, V]; [N], in nats, not yet times T²."""
    match kind:
        case "fkl":
            return forward_kl(student, teacher)
        case "rkl":
            return reverse_kl(student, teacher)
        case "jsd":
            return jensen_shannon(student, teacher)
        case "skl":
            return skew_kl(student, teacher)
        case "srkl":
            return skew_reverse_kl(student, teacher)


def softened(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(z / T) in fp32."""
    return F.log_softmax(logits.float() / temperature, dim=-1)


def binary_divergence(kind: Divergence, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over labels of the divergence of each label's Bernoulli, from logits [N, C]; [N], not yet times T².

    A label is a two-class distribution with logits (z, 0); this is BCE with soft targets, less the
    teacher's entropy.
    """

    def two_classes(logits: Tensor) -> Tensor:
        scaled = logits.float() / temperature
        return torch.stack([F.logsigmoid(scaled), F.logsigmoid(-scaled)], dim=-1)

    return divergence(kind, two_classes(student), two_classes(teacher)).mean(-1)


def hidden_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over the width of (h_s − h_t)², from hidden states [N, H] (TinyBERT, arXiv 1909.10351); [N]."""
    return (student.float() - teacher.float()).square().mean(-1)


def hidden_cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """1 − cos(h_s, h_t), from hidden states [N, H] (DistilBERT, arXiv 1910.01108); [N]."""
    return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)


def relation_kl(student: Tensor, teacher: Tensor, mask: Tensor, heads: int, causal: bool) -> Tensor:
    """KL between the self-attention relations of two models (MiniLMv2, arXiv 2012.15828); [B, T].

    ``student`` [B, T, Ds] and ``teacher`` [B, T, Dt] are all queries, keys or values of a layer, cut into the
    same number of relation ``heads``, so widths may differ. The relation of a head is
    softmax(x xᵀ / √d). ``mask`` [B, T] is true on real tokens; the KL is a mean over heads, and 0 on padding.
    """

    def relations(x: Tensor) -> Tensor:
        batch, length, width = x.shape
        x = x.float().reshape(batch, length, heads, width // heads).transpose(1, 2)
        scores = x @ x.transpose(-1, -2) / (width // heads) ** 0.5
        allowed = mask[:, None, None, :].bool()
        if causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        return F.log_softmax(scores.masked_fill(~allowed, MASKED), dim=-1)

    kl = forward_kl(relations(student), relations(teacher)).mean(1)
    return kl * mask
