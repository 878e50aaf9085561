"""Which tokens are scored, and what the model is shown when it predicts them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compressor.errors import InputRefused
from compressor.sources.text import TokenSet

IGNORED = -100


@dataclass(frozen=True)
class Targets:
    """Model inputs and the token each position must predict.

    ``input_ids`` int64 [n, L] and ``attention_mask`` bool [n, L], padded on the right. ``labels`` int64
    [n, L]: the logits at position t predict ``labels[:, t]``, or nothing where it is ``IGNORED``.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if (self.attention_mask[:, 1:] > self.attention_mask[:, :-1]).any():
            raise ValueError("sequences must be padded on the right")
        if not (self.labels != IGNORED).any():
            raise InputRefused("the evaluation data has no token to score: give longer texts")


def next_token_targets(tokens: TokenSet) -> Targets:
    """Causal language modelling: position t predicts token t + 1, padding excluded.

    The first token of a window has no context in it and is not scored, so a window of L real tokens
    scores L - 1.
    """
    ids, mask = tokens.input_ids, tokens.attention_mask.bool()
    labels = torch.full_like(ids, IGNORED)
    scored = mask[:, :-1] & mask[:, 1:]
    labels[:, :-1] = torch.where(scored, ids[:, 1:], IGNORED)
    return Targets(ids, mask, labels)


def masked_token_targets(
    tokens: TokenSet, *, mask_token_id: int, special_ids: frozenset[int], seed: int, fraction: float = 0.15
) -> Targets:
    """Masked language modelling: a seeded ``fraction`` of each sequence's ordinary tokens is hidden and predicted.

    Every hidden token is replaced by the mask token (none by a random or the true token, unlike in
    BERT's training). The choice depends on the seed, the sequence's number and its tokens only.
    """
    mask = tokens.attention_mask.bool()
    ordinary = mask & ~torch.isin(tokens.input_ids, torch.tensor(sorted(special_ids)))
    hidden = torch.zeros_like(mask)
    for row in range(len(mask)):
        positions = ordinary[row].nonzero().flatten().numpy()
        if len(positions):
            chosen = max(1, round(fraction * len(positions)))
            picks = np.random.default_rng([seed, row]).choice(positions, size=chosen, replace=False)
            hidden[row, torch.from_numpy(picks)] = True
    labels = torch.where(hidden, tokens.input_ids, IGNORED)
    return Targets(tokens.input_ids.masked_fill(hidden, mask_token_id), mask, labels)
