"""Matthews correlation of many classes (Gorodkin 2004), the metric of CoLA, as a module of the ``evaluate`` library, so that it needs no hub."""

from typing import Any

import datasets
import evaluate
import numpy as np


class Metric(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(
            {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        classes = range(max(*predictions, *references) + 1)
        p = np.array([[x == c for c in classes] for x in predictions], dtype=float)
        r = np.array([[x == c for c in classes] for x in references], dtype=float)
        p, r = p - p.mean(0), r - r.mean(0)
        spread = float(np.sqrt((p * p).sum() * (r * r).sum()))
        return {"matthews": float((p * r).sum()) / spread if spread else 0.0}
