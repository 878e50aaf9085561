"""Rank correlation of numbers, the metric of STS-B, as a module of the ``evaluate`` library, so that it needs no hub."""

from typing import Any

import datasets
import evaluate
from scipy import stats


class Metric(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(
            {"predictions": datasets.Value("float32"), "references": datasets.Value("float32")}
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        return {"spearman": float(stats.spearmanr(predictions, references).statistic)}
