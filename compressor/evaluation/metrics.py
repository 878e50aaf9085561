"""From per-sequence sums to reported numbers with 95 % intervals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compressor.evaluation.bootstrap import Estimate, Floats, estimate, resample_sums
from compressor.evaluation.embedding import EmbeddingEvaluation
from compressor.evaluation.pair import Evaluation

Better = Literal["lower", "higher"]
RESAMPLES = 2000


@dataclass(frozen=True)
class Metric:
    """One number about the compressed model and, where it makes sense, about the baseline.

    ``change`` is compressed − baseline and ``ratio`` compressed ÷ baseline, both from paired resamples.
    ``quantiles`` describe the spread over tokens (or sequences). A metric that compares both models
    (KL, agreement, cosine) has a ``compressed`` value only.
    """

    unit: str
    better: Better
    compressed: Estimate
    baseline: Estimate | None = None
    change: Estimate | None = None
    ratio: Estimate | None = None
    quantiles: dict[str, float] | None = None


def language_model_metrics(
    evaluation: Evaluation, *, seed: int, resamples: int = RESAMPLES
) -> dict[str, Metric]:
    """``perplexity`` and ``nll``; with a baseline also ``kl`` and ``top1_agreement``.

    Every value is a ratio of sums over all scored tokens: perplexity = exp(Σ nll ÷ Σ count). Perplexity is
    left out when it overflows (beyond 709 nats per token), as no number could be reported.
    """
    columns: dict[str, Floats] = {
        name: values for name, values in vars(evaluation).items() if values is not None and name != "token_kl"
    }
    sums = resample_sums(columns, resamples=resamples, seed=seed)

    def per_token(name: str) -> Estimate:
        return estimate(lambda s: s[name] / s["count"], columns, sums)

    def perplexity(name: str) -> Estimate:
        return estimate(lambda s: np.exp(s[name] / s["count"]), columns, sums)

    metrics = {
        "perplexity": Metric("", "lower", perplexity("nll")),
        "nll": Metric("nats/token", "lower", per_token("nll")),
    }
    if evaluation.kl is not None and evaluation.token_kl is not None:
        metrics = {
            "perplexity": Metric(
                "",
                "lower",
                compressed=perplexity("nll"),
                baseline=perplexity("baseline_nll"),
                change=estimate(_perplexity_change, columns, sums),
                ratio=estimate(lambda s: np.exp((s["nll"] - s["baseline_nll"]) / s["count"]), columns, sums),
            ),
            "nll": Metric(
                "nats/token",
                "lower",
                compressed=per_token("nll"),
                baseline=per_token("baseline_nll"),
                change=estimate(lambda s: (s["nll"] - s["baseline_nll"]) / s["count"], columns, sums),
            ),
            "kl": Metric(
                "nats/token",
                "lower",
                compressed=per_token("kl"),
                quantiles=_quantiles(evaluation.token_kl, (50, 95, 99, 100)),
            ),
            "top1_agreement": Metric("fraction", "higher", compressed=per_token("agree")),
        }
    if not _finite(metrics["perplexity"]):
        del metrics["perplexity"]
    return metrics


def embedding_metrics(
    evaluation: EmbeddingEvaluation, *, seed: int, resamples: int = RESAMPLES
) -> dict[str, Metric]:
    """``cosine`` and ``neighbour_agreement``, means over sequences."""
    columns = {
        "count": np.ones(len(evaluation.cosine)),
        "cosine": evaluation.cosine,
        "neighbour": evaluation.same_neighbour,
    }
    sums = resample_sums(columns, resamples=resamples, seed=seed)
    return {
        "cosine": Metric(
            "",
            "higher",
            compressed=estimate(lambda s: s["cosine"] / s["count"], columns, sums),
            quantiles=_quantiles(evaluation.cosine, (0, 1, 5, 50)),
        ),
        "neighbour_agreement": Metric(
            "fraction", "higher", compressed=estimate(lambda s: s["neighbour"] / s["count"], columns, sums)
        ),
    }


def _perplexity_change(s: Mapping[str, Floats]) -> Floats:
    return np.exp(s["nll"] / s["count"]) - np.exp(s["baseline_nll"] / s["count"])


def _finite(metric: Metric) -> bool:
    estimates = (metric.compressed, metric.baseline, metric.change, metric.ratio)
    numbers = [x for e in estimates if e is not None for x in (e.value, e.low, e.high) if x is not None]
    return bool(np.isfinite(numbers).all())


def _quantiles(values: Floats, percents: tuple[int, ...]) -> dict[str, float]:
    names = {0: "min", 100: "max"}
    points = np.percentile(values, percents)
    return {
        names.get(percent, f"p{percent}"): float(point)
        for percent, point in zip(percents, points, strict=True)
    }
