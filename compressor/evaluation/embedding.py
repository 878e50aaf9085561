"""How far an encoder's sentence embeddings moved: same sequences, same pooling, original against compressed."""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from compressor.console import steps
from compressor.errors import InputRefused
from compressor.evaluation.bootstrap import Floats
from compressor.evaluation.pair import evaluation_mode, memory_errors, model_inputs
from compressor.sources.text import TokenSet


@dataclass(frozen=True)
class EmbeddingEvaluation:
    """Per sequence, float64 [n].

    ``cosine``: similarity of the two models' embeddings of the same sequence. ``same_neighbour``: 1
    where both models find the same nearest other sequence of this set (by cosine), else 0.
    """

    cosine: Floats
    same_neighbour: Floats


def evaluate_embeddings(
    baseline: nn.Module,
    compressed: nn.Module,
    tokens: TokenSet,
    *,
    batch_size: int,
    device: torch.device | str,
) -> EmbeddingEvaluation:
    """Compare mean-pooled embeddings of ``compressed`` with those of ``baseline``.

    Both models must be on ``device`` and give ``last_hidden_state`` [B, T, D]. Raises InputRefused when
    an embedding is not finite or the widths differ, or when there are fewer than three sequences.
    """
    if len(tokens.input_ids) < 3:
        raise InputRefused("comparing nearest neighbours takes at least 3 sequences: give more data")
    total = 2 * -(-len(tokens.input_ids) // batch_size)
    with torch.inference_mode(), steps("evaluate", total) as progress, memory_errors(batch_size):
        embeddings = []
        for model in (baseline, compressed):
            batches = []
            with ExitStack() as stack:
                stack.enter_context(evaluation_mode(model))
                for start in range(0, len(tokens.input_ids), batch_size):
                    batch = slice(start, start + batch_size)
                    batches.append(
                        mean_pooled(model, tokens.input_ids[batch], tokens.attention_mask[batch], device)
                    )
                    progress.advance()
            embeddings.append(torch.cat(batches).cpu().double())
    for model, vectors in zip((baseline, compressed), embeddings, strict=True):
        finite = torch.isfinite(vectors).all(-1)
        if not finite.all():
            name = getattr(model, "name_or_path", "") or type(model).__name__
            raise InputRefused(
                f"{name}: NaN or infinite embedding of sequence {int((~finite).nonzero()[0])}: "
                "try --dtype float32, or the checkpoint is broken"
            )
    original, changed = embeddings
    if original.shape != changed.shape:
        raise InputRefused(
            f"embeddings differ in width: {original.shape[1]} against {changed.shape[1]}: "
            "give the checkpoint it was made from"
        )
    cosine = torch.nn.functional.cosine_similarity(original, changed, dim=-1)
    same = nearest_neighbour(original) == nearest_neighbour(changed)
    return EmbeddingEvaluation(cosine.numpy(), same.numpy().astype(np.float64))


def mean_pooled(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, device: torch.device | str
) -> Tensor:
    """Mean over real tokens of the last hidden state, fp32 [B, D] (as sentence-transformers' mean pooling)."""
    inputs = model_inputs(input_ids, attention_mask, device)
    hidden = model(**inputs).last_hidden_state.float()
    weights = attention_mask[:, : hidden.shape[1]].to(device, torch.float32)[:, :, None]
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def nearest_neighbour(embeddings: Tensor, block: int = 1024) -> Tensor:
    """Index of the most similar other row by cosine, int64 [n], ``block`` rows at a time."""
    unit = torch.nn.functional.normalize(embeddings, dim=-1)
    nearest = []
    for start in range(0, len(unit), block):
        similarity = unit[start : start + block] @ unit.T
        rows = torch.arange(len(similarity))
        similarity[rows, rows + start] = -torch.inf
        nearest.append(similarity.argmax(-1))
    return torch.cat(nearest)
