"""Metrics of the ``evaluate`` library on a task's predictions: bundled ones by name, others by path or hub id."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.errors import InputRefused, UsageError

BUNDLED = sorted(path.stem for path in (Path(__file__).parent / "metric_modules").glob("*.py"))


def load_metrics(names: Sequence[str]) -> dict[str, Any]:
    """The metric modules by name. Raises UsageError for one that cannot be loaded (a hub id needs the hub)."""
    if not names:
        return {}
    import evaluate  # slow to import, and seldom needed

    loaded = {}
    for name in names:
        bundled = Path(__file__).parent / "metric_modules" / f"{name}.py"
        try:
            loaded[name] = evaluate.load(str(bundled) if bundled.exists() else name)
        except Exception as error:  # missing files, packages of the metric, the network: all the same here
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"--metric {name}: neither one of {', '.join(BUNDLED)} nor a metric that evaluate loads ({reason})"
            ) from None
    return loaded


def compute(
    metrics: dict[str, Any], predictions: Sequence[Any], references: Sequence[Any]
) -> dict[str, float]:
    """All numbers that ``metrics`` give. Raises InputRefused when one does not take this task's predictions."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            result = metric.compute(predictions=list(predictions), references=list(references))
        except (ValueError, TypeError, KeyError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputRefused(f"--metric {name} does not fit the task's predictions ({reason})") from None
        for key, value in result.items():
            if isinstance(value, int | float):
                found[key] = float(value)
    return found
