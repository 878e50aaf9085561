"""Score a compressed model against its original on exactly the same tokens, through the same code.

Sums are kept per sequence, so that every interval can come from one paired bootstrap.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from compressor.console import steps
from compressor.errors import InputRefused, MachineLimit
from compressor.evaluation.bootstrap import Floats
from compressor.evaluation.targets import IGNORED, Targets, next_token_targets
from compressor.sources.text import TokenSet

# Logits converted to fp32 at a time: what stays in a processor's cache, or keeps a GPU busy (128 MiB a copy).
_CHUNK = {"cpu": 1 << 18}
_GPU_CHUNK = 1 << 25


@dataclass(frozen=True)
class Evaluation:
    """Sums over the scored tokens of each sequence, float64 [n]; the last four need a baseline.

    ``count``: tokens scored. ``nll``: negative log-likelihood under the compressed model, in nats.
    ``baseline_nll``: the same under the original. ``kl``: KL(original ‖ compressed), in nats.
    ``agree``: tokens where both models rank the same token first. ``token_kl``: the KL of every
    scored token, [count.sum()].
    """

    count: Floats
    nll: Floats
    baseline_nll: Floats | None = None
    kl: Floats | None = None
    agree: Floats | None = None
    token_kl: Floats | None = None


@dataclass(frozen=True)
class TokenScores:
    """Per-token results for one chunk, each [tokens]: fp64, or bool for the ``finite`` flags and ``agree``."""

    nll: Tensor
    finite: Tensor
    baseline_nll: Tensor | None = None
    baseline_finite: Tensor | None = None
    kl: Tensor | None = None
    agree: Tensor | None = None


def token_scores(logits: Tensor, baseline_logits: Tensor | None, labels: Tensor) -> TokenScores:
    """NLL of ``labels`` [tokens] and KL(baseline ‖ compressed) from two [tokens, V] logit matrices.

    With logits shifted by their row maximum, u of the baseline and v of the compressed model, and
    Z(x) = Σ_v e^x: NLL = log Z(v) − v[label] and KL = Σ_v e^u (u − v) ÷ Z(u) + log Z(v) − log Z(u).
    Elements are fp32 and sums fp64, which leaves an error of 3e-8 nats in one token's KL, against 4e-7
    for the difference of two fp32 log-softmaxes.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64  # mps has no fp64
    v, compressed_finite, first = _shifted(logits)
    log_zv = v.exp().sum(-1, dtype=wide).log()
    nll = log_zv - v.gather(-1, labels[:, None])[:, 0]
    if baseline_logits is None:
        return TokenScores(nll, compressed_finite)
    u, baseline_finite, baseline_first = _shifted(baseline_logits)
    weights = u.exp()
    zu = weights.sum(-1, dtype=wide)
    baseline_nll = zu.log() - u.gather(-1, labels[:, None])[:, 0]
    kl = u.sub_(v).mul_(weights).sum(-1, dtype=wide) / zu + log_zv - zu.log()
    # What is below zero is rounding.
    return TokenScores(
        nll, compressed_finite, baseline_nll, baseline_finite, kl.clamp_(min=0), first == baseline_first
    )


def _shifted(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 logits minus their row maximum [tokens, V], whether all are finite [tokens], the first maximum's index."""
    values = logits.float()
    top = values.amax(-1, keepdim=True)
    finite = torch.isfinite(top[:, 0]) & torch.isfinite(values.amin(-1))  # NaN passes through both reductions
    return values - top, finite, values.argmax(-1)


def evaluate_pair(
    baseline: nn.Module | None,
    compressed: nn.Module,
    tokens: TokenSet,
    *,
    batch_size: int,
    device: torch.device | str,
    targets: Targets | None = None,
) -> Evaluation:
    """Score ``compressed``, and its distance to ``baseline`` when there is one.

    Both models must be on ``device`` and map ``input_ids`` [B, T] (and ``attention_mask`` where a batch
    holds padding) to an output with ``logits`` [B, T, V]. ``targets`` defaults to next-token
    prediction. At most one batch of logits per model is alive, and fp32 copies of a few tokens of it.

    Raises InputRefused when logits are not finite or the vocabularies differ, MachineLimit when the
    device runs out of memory.
    """
    targets = targets or next_token_targets(tokens)
    n = len(targets.input_ids)
    counts = (targets.labels != IGNORED).sum(1).double().numpy()
    sums: dict[str, list[Floats]] = {}
    token_kl: list[Floats] = []
    label = "evaluate" if baseline is not None else "perplexity"
    with torch.inference_mode(), ExitStack() as stack:
        for model in filter(None, (baseline, compressed)):
            stack.enter_context(evaluation_mode(model))
        progress = stack.enter_context(steps(label, -(-n // batch_size)))
        stack.enter_context(memory_errors(batch_size))
        for start in range(0, n, batch_size):
            scores = _score_batch(baseline, compressed, targets, slice(start, start + batch_size), device)
            for name, values in scores.items():
                sums.setdefault(name, []).append(values["sums"])
            if "kl" in scores:
                token_kl.append(scores["kl"]["tokens"])
            progress.advance()
    joined = {name: np.concatenate(parts) for name, parts in sums.items()}
    return Evaluation(count=counts, token_kl=np.concatenate(token_kl) if token_kl else None, **joined)


def _score_batch(
    baseline: nn.Module | None,
    compressed: nn.Module,
    targets: Targets,
    batch: slice,
    device: torch.device | str,
) -> dict[str, dict[str, Floats]]:
    """Per-sequence sums and per-token values of one batch, by field name of :class:`Evaluation`."""
    labels = targets.labels[batch]
    rows, columns = (labels != IGNORED).nonzero(as_tuple=True)  # on the CPU: no device sync
    inputs = model_inputs(targets.input_ids[batch], targets.attention_mask[batch], device)
    logits = _logits(compressed, inputs)
    baseline_logits = _logits(baseline, inputs) if baseline is not None else None
    if baseline_logits is not None and baseline_logits.shape != logits.shape:
        raise InputRefused(
            f"the vocabularies differ: {baseline_logits.shape[-1]} logits from the baseline {_name(baseline)} "
            f"and {logits.shape[-1]} from {_name(compressed)}: give the checkpoint it was made from"
        )

    width, vocabulary = inputs["input_ids"].shape[1], logits.shape[-1]
    flat = logits.reshape(-1, vocabulary)
    baseline_flat = baseline_logits.reshape(-1, vocabulary) if baseline_logits is not None else None
    positions = (rows * width + columns).to(device)
    wanted = labels[rows, columns].to(device)
    chunk = max(1, _CHUNK.get(logits.device.type, _GPU_CHUNK) // vocabulary)
    parts = [
        token_scores(flat[at], baseline_flat[at] if baseline_flat is not None else None, label)
        for at, label in zip(positions.split(chunk), wanted.split(chunk), strict=True)
    ]

    def collect(field: str) -> Floats | None:
        values = [getattr(part, field) for part in parts]
        return torch.cat(values).cpu().double().numpy() if values and values[0] is not None else None

    for model, field in ((baseline, "baseline_finite"), (compressed, "finite")):
        finite = collect(field)
        if finite is not None and not finite.all():
            first = int(np.argmin(finite))
            raise InputRefused(
                f"{_name(model)}: NaN or infinite logits at sequence {batch.start + int(rows[first])}, "
                f"position {int(columns[first])}: try --dtype float32, or the checkpoint is broken"
            )
    scores = {}
    for field in ("nll", "baseline_nll", "kl", "agree"):
        values = collect(field)
        if values is not None:
            per_sequence = np.bincount(rows.numpy(), values, len(labels)).astype(np.float64)
            scores[field] = {"tokens": values, "sums": per_sequence}
    return scores


def model_inputs(input_ids: Tensor, attention_mask: Tensor, device: torch.device | str) -> dict[str, Tensor]:
    """What a model is called with: columns that are all padding are cut, and a mask is given only if needed.

    Without padding the model may take its fast attention path; the results are the same.
    """
    width = int(attention_mask.sum(1).max())
    input_ids, attention_mask = input_ids[:, :width], attention_mask[:, :width]
    inputs = {"input_ids": input_ids.to(device)}
    if not attention_mask.all():
        inputs["attention_mask"] = attention_mask.to(device, torch.int64)
    return inputs


def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(**inputs).logits
    assert isinstance(logits, Tensor)
    return logits


def _name(model: nn.Module | None) -> str:
    return str(getattr(model, "name_or_path", "")) or type(model).__name__


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout and the like are off inside, and as they were outside."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def memory_errors(batch_size: int) -> Iterator[None]:
    """Turn the device's out-of-memory error into one that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        advice = "lower --batch-size or --sequence-length" if batch_size > 1 else "lower --sequence-length"
        raise MachineLimit(
            f"out of device memory while evaluating with batch size {batch_size}: {advice}"
        ) from None
