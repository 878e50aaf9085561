"""The whole evaluation of one checkpoint, with or without its original."""

import time
from dataclasses import dataclass

from transformers import PreTrainedModel

from compressor.checkpoint import kv_cache
from compressor.evaluation.bootstrap import CONFIDENCE
from compressor.evaluation.continuations import Generation, continuations
from compressor.evaluation.embedding import evaluate_embeddings
from compressor.evaluation.load import Task, load_for_evaluation
from compressor.evaluation.metrics import RESAMPLES, Metric, embedding_metrics, language_model_metrics
from compressor.evaluation.pair import evaluate_pair
from compressor.evaluation.prepare import Preparation
from compressor.sources.model import Source, load_tokenizer
from compressor.sources.text import DataReport

_FEW = 8  # sequences


@dataclass(frozen=True)
class EvaluationResult:
    """The numbers and everything needed to measure them again.

    ``window`` and ``stride`` are in tokens (windows do not overlap). ``tokens``: tokens scored (in an
    embedding evaluation, tokens read). ``seconds`` includes loading.
    """

    task: Task
    metrics: dict[str, Metric]
    data: DataReport
    window: int
    stride: int
    sequences: int
    tokens: int
    batch_size: int
    dtype: str
    device: str
    attention: str | None
    pooling: str | None
    confidence: float
    resamples: int
    seed: int
    seconds: float
    notes: tuple[str, ...]
    generations: tuple[Generation, ...] = ()


def evaluate_checkpoint(preparation: Preparation) -> EvaluationResult:
    """Load what was prepared and measure it.

    Baseline and compressed model get the same dtype, device, attention code and batches. Raises InputRefused and MachineLimit as the loader and the scorer do.
    """
    start = time.monotonic()
    settings, tokens = preparation.settings, preparation.tokens

    def load(source: Source) -> PreTrainedModel:
        return load_for_evaluation(
            source.path,
            dtype=preparation.dtype,
            device=preparation.device,
            trust_remote_code=source.trust_remote_code,
        )

    baseline = load(preparation.baseline) if preparation.baseline is not None else None
    compressed = load(preparation.compressed)
    if preparation.task == "embedding":
        assert baseline is not None
        embeddings = evaluate_embeddings(
            baseline, compressed, tokens, batch_size=settings.batch_size, device=preparation.device
        )
        metrics, scored = embedding_metrics(embeddings, seed=settings.seed), int(tokens.attention_mask.sum())
    else:
        scores = evaluate_pair(
            baseline,
            compressed,
            tokens,
            batch_size=settings.batch_size,
            device=preparation.device,
            targets=preparation.targets,
        )
        metrics, scored = language_model_metrics(scores, seed=settings.seed), int(scores.count.sum())
    generations: tuple[Generation, ...] = ()
    if preparation.task == "causal-lm" and settings.generations:
        generations = continuations(
            baseline,
            compressed,
            tokens,
            load_tokenizer(preparation.compressed),
            count=settings.generations,
            device=preparation.device,
        )
    notes = []
    if kv_cache.declared(preparation.compressed.config):
        notes.append(
            "keys and values went through a simulated FP8 cache with the checkpoint's scales; serve it with: "
            f"vllm serve {preparation.compressed.ref} --kv-cache-dtype fp8"
        )
    if preparation.task != "embedding" and "perplexity" not in metrics:
        notes.append("perplexity overflows and is left out: see the negative log-likelihood")
    if len(tokens.input_ids) < _FEW:
        notes.append(
            f"{len(tokens.input_ids)} sequences are too few for trustworthy intervals: use {_FEW} or more"
        )
    return EvaluationResult(
        task=preparation.task,
        metrics=metrics,
        data=tokens.report,
        window=settings.sequence_length,
        stride=settings.sequence_length,
        sequences=len(tokens.input_ids),
        tokens=scored,
        batch_size=settings.batch_size,
        dtype=preparation.dtype,
        device=preparation.device,
        attention=getattr(compressed.config, "_attn_implementation", None),
        pooling="mean" if preparation.task == "embedding" else None,
        confidence=CONFIDENCE,
        resamples=RESAMPLES,
        seed=settings.seed,
        seconds=time.monotonic() - start,
        notes=tuple(notes),
        generations=generations,
    )
