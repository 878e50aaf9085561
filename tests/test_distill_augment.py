"""Variants of training examples that only the teacher answers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.distillation.augment import augmented
from compressor.distillation.forward import Rows, TeacherRows, row_loss
from compressor.distillation.fused import Objective
from compressor.distillation.tasks import IGNORED, Examples, collate, example_of

CLS, SEP, PAD = 1, 2, 0


def data(lengths: list[int]) -> Examples:
    items = []
    for number, length in enumerate(lengths):
        ids = [CLS, *range(10, 10 + length), SEP]
        items.append(
            example_of({"input_ids": ids, "token_type_ids": [0] * len(ids)}, [number % 2], reference=[0])
        )
    return Examples("classification", tuple(items), ("a", "b"), "here", 0, "0")


def variants(examples: Examples, copies: int, seed: int = 0) -> Examples:
    return augmented(examples, copies, special_ids=frozenset({CLS, SEP, PAD}), seed=seed)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_variants_are_parts_of_their_examples(lengths: list[int], copies: int, seed: int) -> None:
    examples = data(lengths)
    found = variants(examples, copies, seed)
    vocabulary = {token for example in examples.items for token in example.inputs["input_ids"][1:-1]}
    assert found.items[: len(examples)] == examples.items
    assert len(found) == (1 + copies) * len(examples)
    assert found.sha256 != examples.sha256
    for at, variant in enumerate(found.items[len(examples) :]):
        original = examples.items[at % len(examples)].inputs["input_ids"]
        ids = variant.inputs["input_ids"]
        assert variant.labels == [IGNORED]
        assert ids[0] == CLS
        assert ids[-1] == SEP
        if len(ids) < len(original):  # a stretch
            assert any(original[i : i + len(ids) - 2] == ids[1:-1] for i in range(1, len(original)))
        else:
            assert set(ids[1:-1]) <= vocabulary
        assert len(variant.inputs["token_type_ids"]) == len(ids)
    assert variants(examples, copies, seed) == found


def test_long_examples_are_cut_or_changed() -> None:
    found = variants(data([30] * 20), 4).items[20:]
    assert sum(len(v.inputs["input_ids"]) < 32 for v in found) > 20
    same = data([30]).items[0].inputs["input_ids"]
    changed = [v.inputs["input_ids"] for v in found if len(v.inputs["input_ids"]) == 32]
    assert sum(ids != same for ids in changed) > 20
    assert all(sum(a != b for a, b in zip(ids, same, strict=True)) < 20 for ids in changed)


@pytest.mark.parametrize("kind", ["fkl", "jsd"])
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_only_the_teacher_speaks_of_them(kind: str, alpha: float) -> None:
    """Loss and gradient are those of the labelled rows, plus the divergence alone of the others."""
    torch.manual_seed(0)
    logits, taught = torch.randn(6, 2, requires_grad=True), torch.randn(6, 2)
    labels = torch.tensor([0, IGNORED, 1, IGNORED, 1, 0])

    def loss(rows: list[int], given_labels: torch.Tensor, alpha: float) -> torch.Tensor:
        log_p = torch.log_softmax(taught[rows] / 3.0, -1)
        teacher = TeacherRows(lambda start, stop: log_p[start:stop])
        said = Rows(None, None, logits[rows], None)
        return row_loss("classification", said, given_labels, teacher, Objective(kind, 3.0, alpha)).total

    whole = loss(list(range(6)), labels, alpha)
    parts = loss([0, 2, 4, 5], labels[labels >= 0], alpha) + alpha * loss([1, 3], torch.tensor([0, 1]), 1.0)
    torch.testing.assert_close(whole, parts)
    (found,) = torch.autograd.grad(whole, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(parts, logits)
    torch.testing.assert_close(found, expected)


def test_batches_hold_them() -> None:
    examples = variants(data([5, 9]), 1)
    batch = collate("classification", examples.items, pad_id=PAD)
    assert batch.labels.tolist() == [0, 1, IGNORED, IGNORED]
    assert batch.counts == (1, 1, 1, 1)
