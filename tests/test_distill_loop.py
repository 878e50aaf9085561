"""The loop: exact accumulation, exact resume, the best student, and plain checkpoints."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from compressor.distillation.forward import RowModel, row_loss
from compressor.distillation.fused import Objective
from compressor.distillation.loop import Order, Progress, Training, learning_rate, shares, train
from compressor.distillation.measure import better, score, value
from compressor.distillation.models import save_student
from compressor.distillation.tasks import Batch, DataSpec, Examples, collate, read_examples
from compressor.distillation.teacher import LiveTeacher
from compressor.errors import InputRefused, UsageError

MakeLlama = Callable[..., Path]


@pytest.fixture(scope="module")
def pair(make_llama: MakeLlama) -> tuple[Path, Path]:
    return make_llama(seed=1, num_hidden_layers=2), make_llama(seed=2, num_hidden_layers=1)


@pytest.fixture(scope="module")
def examples(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Examples:
    """Completions of very uneven lengths."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [
        {"prompt": "The quick" + " brown" * (i % 5), "completion": " fox jumps over" * (1 + 3 * (i % 4))}
        for i in range(24)
    ]
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    return read_examples(
        "causal-lm", DataSpec(str(file), columns=(("prompt", "prompt"),), length=64), tokenizer
    )


def run(
    pair: tuple[Path, Path],
    examples: Examples,
    directory: Path,
    *,
    alpha: float = 0.5,
    log: Callable[[dict[str, float], int], None] = lambda values, step: None,
    evaluate: Callable[[RowModel], float] | None = None,
    **changes: Any,
) -> tuple[PreTrainedModel, Progress]:
    teacher, student = (AutoModelForCausalLM.from_pretrained(path) for path in pair)
    rows = RowModel(teacher, teacher, "causal-lm", fused=True)
    settings: dict[str, Any] = {
        "steps": 4, "seconds": None, "batch_size": 8, "micro_batch": 8, "learning_rate": 1e-2, "seed": 3,
    }  # fmt: skip
    progress = train(
        student,
        LiveTeacher(rows, temperature=2.0, vocabulary=None) if alpha else None,
        examples,
        Objective("fkl", 2.0, alpha),
        Training(**(settings | changes)),
        accelerator=Accelerator(cpu=True),
        directory=directory,
        pad_id=0,
        make_rows=lambda module: RowModel(module, student, "causal-lm", fused=True),
        evaluate=evaluate
        or (lambda model: value("causal-lm", score(model, examples, pad_id=0, batch_size=8))),
        better=better("causal-lm"),
        save_student=save_student,
        log=log,
    )
    return student, progress


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_is_exact_over_uneven_lengths(
    pair: tuple[Path, Path], examples: Examples, tmp_path: Path, micro: int
) -> None:
    """8×1 = 4×2 = 2×4 = 1×8: the same parameters after steps with a plain SGD-like comparison of gradients."""
    whole, _ = run(pair, examples, tmp_path / "a", steps=2)
    split, _ = run(pair, examples, tmp_path / "b", steps=2, micro_batch=micro)
    for (name, a), b in zip(whole.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4, msg=name)


def test_gradients_are_the_mean_over_all_tokens_of_the_step(
    pair: tuple[Path, Path], examples: Examples
) -> None:
    """A mean of micro-batch means would weigh short completions more; here it must be one division."""
    items = examples.items[:8]
    total = sum(e.rows("causal-lm") for e in items)
    gradients = []
    for size in (8, 3, 1):
        student = AutoModelForCausalLM.from_pretrained(pair[1])
        rows = RowModel(student, student, "causal-lm", fused=True)
        for at in range(0, 8, size):
            batch = collate("causal-lm", items[at : at + size], pad_id=0)
            (
                row_loss("causal-lm", rows(batch), batch.labels, None, Objective(alpha=0.0)).total / total
            ).backward()
        gradients.append(student.lm_head.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-4, atol=1e-6)
    student = AutoModelForCausalLM.from_pretrained(pair[1])
    losses = [
        student(torch.tensor([e.inputs["input_ids"]])).logits[0].float().log_softmax(-1)[t, label]
        for e in items
        for t, label in enumerate(e.labels)
        if label >= 0
    ]
    (-torch.stack(losses).mean()).backward()
    torch.testing.assert_close(student.lm_head.weight.grad, gradients[0], rtol=1e-3, atol=1e-5)


def test_sequences_packed_into_one_row_have_the_same_loss(
    pair: tuple[Path, Path], examples: Examples
) -> None:
    """Several sequences in one row, told apart by their positions, teach what they teach side by side."""
    items = examples.items[:5]
    side_by_side = collate("causal-lm", items, pad_id=0)
    ids, positions, supervised, labels = [], [], [], []
    for example in items:
        ids += example.inputs["input_ids"]
        positions += range(len(example.inputs["input_ids"]))
        supervised += [label >= 0 for label in example.labels]
        labels += [label for label in example.labels if label >= 0]
    packed = Batch(
        {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])},
        torch.tensor(labels),
        (len(labels),),
        ("packed",),
        where=torch.tensor([supervised]),
    )
    results = []
    for batch in (side_by_side, packed):
        teacher, student = (AutoModelForCausalLM.from_pretrained(path) for path in pair)
        targets = LiveTeacher(
            RowModel(teacher, teacher, "causal-lm", fused=True), temperature=2.0, vocabulary=None
        )
        rows = RowModel(student, student, "causal-lm", fused=True)
        sums = row_loss("causal-lm", rows(batch), batch.labels, targets(batch), Objective("fkl", 2.0, 0.5))
        (sums.total / len(labels)).backward()
        results.append((sums, student.lm_head.weight.grad))
    (a, of_a), (b, of_b) = results
    assert len(side_by_side.labels) == len(labels)
    torch.testing.assert_close(a.total, b.total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.kd, b.kd, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_a, of_b, rtol=1e-4, atol=1e-6)


_KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from pathlib import Path
from transformers import AutoTokenizer
from test_distill_loop import run
from compressor.distillation.tasks import DataSpec, read_examples
teacher, student, data, directory, kill_at = map(Path, sys.argv[2:7])
spec = DataSpec(str(data), columns=(("prompt", "prompt"),), length=64)
examples = read_examples("causal-lm", spec, AutoTokenizer.from_pretrained(teacher))
def log(values, step):
    if "distill/step_loss" in values and step == int(str(kill_at)):
        os.kill(os.getpid(), signal.SIGKILL)
run((teacher, student), examples, directory, steps=7, save_every=2, dropout=True, log=log)
"""


def test_a_killed_run_ends_in_the_same_bytes(
    pair: tuple[Path, Path], examples: Examples, tmp_path: Path
) -> None:
    """N steps = k steps + SIGKILL + resume, bit for bit, with the moments, the schedule and the curve."""

    def start(directory: str, kill_at: int) -> int:
        command = [sys.executable, "-c", _KILLED, str(Path(__file__).parent), *map(str, pair), examples.source, str(tmp_path / directory), str(kill_at)]  # fmt: skip
        return subprocess.run(command, capture_output=True).returncode

    assert start("straight", -1) == 0
    assert start("killed", 5) == -signal.SIGKILL
    assert [p.name for p in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step-0000005"] or [
        p.name for p in (tmp_path / "killed" / "checkpoints").iterdir()
    ] == ["step-0000004"]
    assert start("killed", -1) == 0
    for part in ("best", "checkpoints/step-0000007"):
        a, b = ((tmp_path / d / part / "model.safetensors").read_bytes() for d in ("straight", "killed"))
        assert a == b
    curves = [
        json.loads((tmp_path / d / "checkpoints/step-0000007/state/progress.json").read_text())["curve"]
        for d in ("straight", "killed")
    ]
    drop = [
        [{k: v for k, v in p.items() if k in ("step", "metric", "learning_rate")} for p in c] for c in curves
    ]
    assert drop[0] == drop[1]


def test_checkpoints_are_plain_students(pair: tuple[Path, Path], examples: Examples, tmp_path: Path) -> None:
    student, progress = run(pair, examples, tmp_path)
    assert progress.step == 4
    (folder,) = (tmp_path / "checkpoints").iterdir()
    stored = AutoModelForCausalLM.from_pretrained(folder)
    names = set(load_file(folder / "model.safetensors"))
    assert names <= set(student.state_dict())  # no teacher tensor, no wrapper's prefix
    for a, b in zip(student.parameters(), stored.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_best_student_is_kept_and_not_the_last(
    pair: tuple[Path, Path], examples: Examples, tmp_path: Path
) -> None:
    metrics = iter([5.0, 3.0, 1.0, 2.0, 4.0])
    seen: list[torch.Tensor] = []

    def evaluate(model: RowModel) -> float:
        seen.append(model.bare.lm_head.weight.detach().clone())
        return next(metrics)

    _, progress = run(pair, examples, tmp_path, evaluate=evaluate)
    assert (progress.best_step, progress.best_metric) == (2, 1.0)
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert torch.equal(best.lm_head.weight, seen[2])


def test_distillation_brings_the_student_to_the_teacher(
    pair: tuple[Path, Path], examples: Examples, tmp_path: Path
) -> None:
    _, progress = run(pair, examples, tmp_path, alpha=1.0, steps=40)
    kd = [p.kd for p in progress.curve if p.kd is not None]
    assert kd[-1] < 0.5 * kd[0]


def test_a_time_budget_ends_the_training(pair: tuple[Path, Path], examples: Examples, tmp_path: Path) -> None:
    _, progress = run(pair, examples, tmp_path, steps=None, seconds=0.5, evaluate=lambda model: 1.0)
    assert 0.5 <= progress.seconds < 30
    assert progress.step >= 1


def test_order_covers_every_example_once_an_epoch() -> None:
    order = Order(10, 4, seed=1)
    ids = np.concatenate([order.batch(step) for step in range(5)])
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))
    assert (Order(10, 4, seed=1).batch(3) == order.batch(3)).all()
    assert not np.array_equal(ids[:10], ids[10:])
    assert shares(np.array([0, 1, 2]), np.array([5, 9, 7]), 2) == [[1, 2], [0]]


def test_learning_rates() -> None:
    training = Training(100, None, 8, 8, 1.0, warmup=0.1, final_learning_rate=0.1)
    rates = [learning_rate(s / 100, training) for s in range(100)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(1.0, training) == pytest.approx(0.1)
    assert math.isclose(
        learning_rate(0.55, Training(1, None, 1, 1, 1.0, schedule="linear", warmup=0.1)), 0.55
    )


def test_impossible_batches_and_broken_gradients_are_one_line(
    pair: tuple[Path, Path], examples: Examples, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="more than the 24 training examples"):
        run(pair, examples, tmp_path / "a", batch_size=64)
    with pytest.raises(InputRefused, match="not finite at step"):
        run(pair, examples, tmp_path / "b", learning_rate=1e30, steps=6, evaluate=lambda model: 1.0)
