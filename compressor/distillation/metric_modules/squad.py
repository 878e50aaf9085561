"""Exact match and F1 of answers (Rajpurkar et al. 2016), as a module of the ``evaluate`` library, so that it needs no hub."""

from typing import Any

import datasets
import evaluate

from compressor.distillation.answers import exact_match, token_f1


class Metric(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(
            {
                "predictions": datasets.Value("string"),
                "references": datasets.Sequence(datasets.Value("string")),
            }
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        return {
            "squad_exact_match": sum(exact_match(p, r) for p, r in pairs) / len(pairs),
            "squad_f1": sum(token_f1(p, r) for p, r in pairs) / len(pairs),
        }
