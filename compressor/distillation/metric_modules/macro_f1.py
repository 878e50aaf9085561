"""F1 of each class, as a mean over the classes that occur, as a module of the ``evaluate`` library, so that it needs no hub."""

from typing import Any

import datasets
import evaluate


class Metric(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(
            {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        scores = []
        for label in sorted({*predictions, *references}):
            pairs = [(p == label, r == label) for p, r in zip(predictions, references, strict=True)]
            hits = sum(p and r for p, r in pairs)
            scores.append(2 * hits / sum(int(p) + int(r) for p, r in pairs))
        return {"macro_f1": sum(scores) / len(scores)}
