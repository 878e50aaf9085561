"""A teacher's distribution in a few numbers a token: the k likeliest ids with a bucket for the rest, or samples.

Keeping the k likeliest and renormalising them is biased: a student that equals its teacher would still be
pushed away from it. With one more bucket for the remaining mass that gradient is zero. Random sampling
(RS-KD, Anshumann et al. 2025, arXiv 2503.16870) is unbiased with any number of samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST = 1e-6  # mass of a bucket below which it is rounding of fp32 sums


@dataclass(frozen=True)
class SparseTargets:
    """N tokens' targets at the temperature they were made for.

    ``ids`` int64 [N, k]. ``log_probs`` fp32 [N, k] are the teacher's. ``weights`` fp32 [N, k] are shares of
    the samples (0 fills up rows with fewer distinct ids); None means top-k, with the rest in one bucket.
    """

    ids: Tensor
    log_probs: Tensor
    weights: Tensor | None = None

    def __getitem__(self, rows: slice) -> "SparseTargets":
        weights = None if self.weights is None else self.weights[rows]
        return SparseTargets(self.ids[rows], self.log_probs[rows], weights)


def top_k(log_probs: Tensor, k: int) -> SparseTargets:
    """The ``k`` likeliest ids of [N, V] log-probabilities."""
    values, ids = log_probs.topk(min(k, log_probs.shape[-1]), dim=-1)
    return SparseTargets(ids, values)


def random_samples(log_probs: Tensor, k: int, generator: torch.Generator) -> SparseTargets:
    """``k`` draws with replacement from each row of [N, V], as distinct ids with shares count ÷ k."""
    drawn = torch.multinomial(log_probs.exp(), k, replacement=True, generator=generator).sort(-1).values
    first = torch.ones_like(drawn, dtype=torch.bool)
    first[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    slot = first.cumsum(-1) - 1
    ids = torch.zeros_like(drawn).scatter_(-1, slot, drawn)
    ones = torch.full(drawn.shape, 1 / k, device=drawn.device)
    weights = torch.zeros_like(ones).scatter_add_(-1, slot, ones)
    width = int(slot.max()) + 1 if len(slot) else k
    ids, weights = ids[:, :width], weights[:, :width]
    return SparseTargets(ids, log_probs.gather(-1, ids), weights)


def sparse_forward_kl(student: Tensor, targets: SparseTargets) -> Tensor:
    """Forward KL [N] in nats of student log-probabilities [N, V] from sparse targets.

    Top-k: Σ_k p_t (log p_t − log p_s) + r_t (log r_t − log r_s), with r = 1 − Σ_k p; a lower bound of the
    KL (merging outcomes loses information) that is 0 where the full one is. Samples: Σ_i w_i (log p_t,i −
    log p_s,i), whose expectation is the KL, and 0 for equal models whatever was drawn.
    """
    kept = student.gather(-1, targets.ids)
    if targets.weights is not None:
        return (targets.weights * (targets.log_probs - kept)).sum(-1)
    share = targets.log_probs.exp()
    kl = (share * (targets.log_probs - kept)).sum(-1)
    rest_teacher = (1 - share.sum(-1)).clamp(min=_SMALLEST)
    rest_student = (1 - kept.exp().sum(-1)).clamp(min=_SMALLEST)
    return kl + rest_teacher * (rest_teacher.log() - rest_student.log())
