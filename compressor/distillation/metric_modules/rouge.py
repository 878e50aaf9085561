"""F1 of the longest common subsequence of words (Lin 2004), as a module of the ``evaluate`` library, so that it needs no hub."""

from typing import Any

import datasets
import evaluate

from compressor.distillation.answers import rouge_l


class Metric(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(
            {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        scores = [rouge_l(p, r) for p, r in zip(predictions, references, strict=True)]
        return {"rouge_l": sum(scores) / len(scores)}
