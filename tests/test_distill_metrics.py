"""Metrics through the evaluate library: the bundled modules by hand, and names that do not exist."""

from pathlib import Path

import pytest

from compressor.distillation.metric_library import BUNDLED, compute, load_metrics
from compressor.errors import InputRefused, UsageError


def test_bundled_modules_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BUNDLED == ["accuracy", "macro_f1", "matthews", "rouge", "spearman", "squad"]
    classes = compute(load_metrics(["accuracy", "macro_f1", "matthews"]), [1, 0, 1, 1], [1, 0, 0, 1])
    assert classes["accuracy"] == 0.75
    assert classes["macro_f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    # (TP·TN − FP·FN) / √((TP+FP)(TP+FN)(TN+FP)(TN+FN)) with TP 2, TN 1, FP 1, FN 0
    assert classes["matthews"] == pytest.approx(2 / (3 * 2 * 2 * 1) ** 0.5)
    assert compute(load_metrics(["spearman"]), [0.1, 0.4, 0.3], [1.0, 3.0, 2.0]) == {
        "spearman": pytest.approx(1.0)
    }
    answers = compute(load_metrics(["squad"]), ["the Paris", ""], [["Paris", "Lyon"], []])
    assert answers == {"squad_exact_match": 1.0, "squad_f1": 1.0}
    assert compute(load_metrics(["rouge"]), ["a x y"], ["x z y"]) == {"rouge_l": pytest.approx(0.8)}


def test_unknown_and_unfit_metrics_are_one_line() -> None:
    with pytest.raises(UsageError, match="--metric nonsense: neither one of accuracy"):
        load_metrics(["nonsense"])
    with pytest.raises(InputRefused, match="--metric accuracy does not fit"):
        compute(load_metrics(["accuracy"]), ["text"], ["text"])
