"""Score a model on a task: sums for each example, from which metrics and their intervals come.

Teacher, student and control go through this same code with the same batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.distillation.answers import best_span, entities, exact_match, rouge_l, token_f1
from compressor.distillation.forward import RowModel
from compressor.distillation.fused import chunk_rows
from compressor.distillation.loop import batches, decoder_start
from compressor.distillation.losses import binary_divergence, forward_kl, softened
from compressor.distillation.tasks import Batch, Example, Examples, TaskName
from compressor.errors import InputRefused
from compressor.evaluation.bootstrap import Estimate, Floats, estimate, resample_sums

Columns = dict[str, Floats]
RESAMPLES = 2000


@dataclass(frozen=True)
class MetricDefinition:
    """A metric as a function of sums over examples; ``better`` says in which direction."""

    unit: str
    better: Literal["lower", "higher"]
    of: Callable[[Mapping[str, Floats]], Floats]


def _ratio(top: str, bottom: str = "count") -> Callable[[Mapping[str, Floats]], Floats]:
    return lambda s: s[top] / np.maximum(s[bottom], 1e-12)


def _f1(s: Mapping[str, Floats]) -> Floats:
    return 2 * s["tp"] / np.maximum(2 * s["tp"] + s["fp"] + s["fn"], 1e-12)


def _pearson(s: Mapping[str, Floats]) -> Floats:
    n = s["count"]
    covariance = s["xy"] - s["x"] * s["y"] / n
    spread = (s["xx"] - s["x"] ** 2 / n) * (s["yy"] - s["y"] ** 2 / n)
    return covariance / np.sqrt(np.maximum(spread, 1e-24))


_PERPLEXITY = MetricDefinition("", "lower", lambda s: np.exp(s["nll"] / s["count"]))
_ACCURACY = MetricDefinition("fraction", "higher", _ratio("correct"))

METRICS: dict[TaskName, dict[str, MetricDefinition]] = {
    "causal-lm": {"perplexity": _PERPLEXITY, "accuracy": _ACCURACY},
    "masked-lm": {"perplexity": _PERPLEXITY, "accuracy": _ACCURACY},
    "seq2seq": {"perplexity": _PERPLEXITY, "rouge_l": MetricDefinition("fraction", "higher", _ratio("rouge", "one"))},
    "classification": {"accuracy": _ACCURACY},
    "multi-label": {"f1": MetricDefinition("fraction", "higher", _f1), "exact_match": MetricDefinition("fraction", "higher", _ratio("exact"))},
    "regression": {"mse": MetricDefinition("", "lower", _ratio("squared")), "pearson": MetricDefinition("", "higher", _pearson)},
    "token-classification": {"f1": MetricDefinition("fraction", "higher", _f1), "accuracy": _ACCURACY},
    "question-answering": {"f1": MetricDefinition("fraction", "higher", _ratio("f1", "questions")), "exact_match": MetricDefinition("fraction", "higher", _ratio("em", "questions"))},
}  # fmt: skip
"""Metrics of every task; the first is the one students are chosen by."""

AGAINST_TEACHER = {
    "kl": MetricDefinition("nats/row", "lower", _ratio("kl")),
    "agreement": MetricDefinition("fraction", "higher", _ratio("agree")),
}


def primary(task: TaskName) -> str:
    """The metric by which the best student is chosen."""
    return next(iter(METRICS[task]))


@torch.no_grad()  # not inference_mode: FSDP gathers parameters here that training goes on with
def score(
    model: RowModel,
    examples: Examples,
    *,
    pad_id: int,
    batch_size: int,
    vocabulary: int | None = None,
    teacher: RowModel | None = None,
    generate: Callable[[Batch], list[str]] | None = None,
    answered: dict[int, tuple[Any, Any]] | None = None,
) -> Columns:
    """Sums of every example, float64 [n] by name (for question answering, of every question).

    With a ``teacher``: ``kl`` = KL(teacher ‖ model) at T = 1 and ``agree``, the rows both rank the same class
    first (for regression: the squared distance and nothing). ``generate`` writes seq2seq answers. ``answered``
    is filled with (prediction, reference) where a task has one for each example or question.
    """
    device = next(model.bare.parameters()).device
    was_training = model.module.training
    model.module.eval()
    n = len(examples)
    columns: Columns = {}
    answers: dict[int, tuple[float, str, float]] = {}

    def put(name: str, ids: Sequence[int], values: Sequence[float] | Floats) -> None:
        columns.setdefault(name, np.zeros(n))[list(ids)] = values

    for ids, make in batches(examples, batch_size, pad_id=pad_id, decoder_start=decoder_start(model.bare)):
        batch = make().to(device)
        rows = model(batch)
        taught = teacher(batch.to(next(teacher.bare.parameters()).device)) if teacher is not None else None
        owner = np.repeat(np.arange(len(ids)), batch.counts)
        values: dict[str, list[Tensor]] = {}
        total = int(batch.labels.shape[0])
        width = rows.head.weight.shape[0] if rows.head is not None else rows.logits.shape[-1]  # type: ignore[union-attr]
        step = chunk_rows(width, device)
        firsts: list[Tensor] = []
        for at in range(0, total, step):
            z = rows.chunk_logits(at, at + step, vocabulary)
            zt = taught.chunk_logits(at, at + step, vocabulary).to(device) if taught is not None else None
            for name, value in _row_values(examples.task, z, batch.labels[at : at + step], zt).items():
                values.setdefault(name, []).append(value)
            firsts.append(
                z if examples.task in ("question-answering", "regression", "multi-label") else z.argmax(-1)
            )
        for name, parts in values.items():
            per_row = torch.cat(parts).double().cpu().numpy()
            put(name, ids, np.bincount(owner, per_row, len(ids)).astype(np.float64))
        put("count", ids, np.array(batch.counts, dtype=np.float64))
        said = torch.cat(firsts).cpu()
        per_example = said.split(list(batch.counts))
        chosen = [examples.items[i] for i in ids]
        for name, sums in _task_sums(examples, chosen, per_example).items():
            put(name, ids, sums)
        if answered is not None:
            answered |= _answers(examples.task, ids, chosen, per_example)
        if examples.task == "question-answering":
            for example, logits in zip(chosen, per_example, strict=True):
                _keep_best(answers, example, logits)
        if generate is not None and examples.task == "seq2seq":
            texts = generate(batch)
            if answered is not None:
                answered |= {i: (t, e.reference) for i, t, e in zip(ids, texts, chosen, strict=True)}
            put("one", ids, np.ones(len(ids)))
            put("rouge", ids, [rouge_l(t, e.reference) for t, e in zip(texts, chosen, strict=True)])
    model.module.train(was_training)
    if "nll" in columns and not np.isfinite(columns["nll"]).all():
        raise InputRefused("the model gives logits that are not finite: try --dtype float32")
    if examples.task == "question-answering":
        columns = _by_question(columns, examples, answers, answered)
    return columns


def _row_values(task: TaskName, z: Tensor, labels: Tensor, zt: Tensor | None) -> dict[str, Tensor]:
    """What is summed over rows: nll, correct, and against the teacher kl and agree."""
    values: dict[str, Tensor] = {}
    if task == "regression":
        values["squared"] = (z - labels).square().mean(-1)
        if zt is not None:
            values["kl"] = (z - zt).square().mean(-1)
        return values
    if task == "multi-label":
        values["nll"] = F.binary_cross_entropy_with_logits(z, labels, reduction="none").mean(-1)
        if zt is not None:
            values["kl"] = binary_divergence("fkl", z, zt, 1.0)
            values["agree"] = ((z > 0) == (zt > 0)).float().mean(-1)
        return values
    log_p = softened(z, 1.0)
    first = z.argmax(-1)
    values["nll"] = -log_p.gather(-1, labels[:, None])[:, 0]
    values["correct"] = (first == labels).float()
    if zt is not None:
        values["kl"] = forward_kl(log_p, softened(zt, 1.0))
        values["agree"] = (first == zt.argmax(-1)).float()
    return values


def _answers(
    task: TaskName, ids: Sequence[int], chosen: Sequence[Example], said: Sequence[Tensor]
) -> dict[int, tuple[Any, Any]]:
    """Predictions and references as metrics of the evaluate library take them."""
    match task:
        case "classification":
            return {i: (int(z[0]), e.labels[0]) for i, e, z in zip(ids, chosen, said, strict=True)}
        case "regression":
            return {
                i: (float(z.flatten()[0]), e.labels[0]) for i, e, z in zip(ids, chosen, said, strict=True)
            }
    return {}


def _task_sums(
    examples: Examples, chosen: Sequence[Example], said: Sequence[Tensor]
) -> dict[str, list[float]]:
    match examples.task:
        case "multi-label":
            pairs = [(z[0] > 0, torch.tensor(e.labels) > 0.5) for e, z in zip(chosen, said, strict=True)]
            return {
                "tp": [float((p & y).sum()) for p, y in pairs],
                "fp": [float((p & ~y).sum()) for p, y in pairs],
                "fn": [float((~p & y).sum()) for p, y in pairs],
                "exact": [float((p == y).all()) for p, y in pairs],
            }
        case "regression":
            x = [float(z.flatten()[0]) for z in said]
            y = [float(e.labels[0]) for e in chosen]
            pairs_xy = list(zip(x, y, strict=True))
            return {
                "x": x, "y": y, "xx": [a * a for a in x], "yy": [b * b for b in y], "xy": [a * b for a, b in pairs_xy],
            }  # fmt: skip
        case "token-classification":
            sums: dict[str, list[float]] = {"tp": [], "fp": [], "fn": []}
            for example, first in zip(chosen, said, strict=True):
                true = entities([examples.classes[i] for i in example.labels if i >= 0])
                found = entities([examples.classes[i] for i in first.tolist()])
                sums["tp"].append(len(true & found))
                sums["fp"].append(len(found - true))
                sums["fn"].append(len(true - found))
            return sums
    return {}


def _keep_best(answers: dict[int, tuple[float, str, float]], example: Example, logits: Tensor) -> None:
    """The best span over all features of a question; CLS stands for no answer."""
    reference = example.reference
    z = torch.log_softmax(logits.double(), -1).numpy()
    inside = np.array(
        [o is not None for o in reference["offsets"]] + [False] * (z.shape[-1] - example.length)
    )
    cls = reference["cls"]
    none_score = float(z[0, cls] + z[1, cls])
    first, last, best = best_span(np.where(inside, z[0], -1e9), np.where(inside, z[1], -1e9))
    offsets = reference["offsets"]
    text = ""
    if inside[first] and inside[last]:
        text = reference["context"][offsets[first][0] : offsets[last][1]]
    known = answers.get(reference["question"], (-np.inf, "", np.inf))
    kept = (best, text) if best > known[0] else known[:2]
    # "No answer" is as likely as in the feature that denies it most (as in SQuAD 2's evaluation).
    answers[reference["question"]] = (*kept, min(none_score, known[2]))


def _by_question(
    columns: Columns,
    examples: Examples,
    answers: dict[int, tuple[float, str, float]],
    answered: dict[int, tuple[Any, Any]] | None,
) -> Columns:
    owner = np.array([example.reference["question"] for example in examples.items])
    names, index = np.unique(owner, return_inverse=True)
    result = {
        name: np.bincount(index, values, len(names)).astype(np.float64) for name, values in columns.items()
    }
    references = {e.reference["question"]: e.reference["answers"] for e in examples.items}
    found = [answers[int(q)] for q in names]
    texts = [text if best > none else "" for best, text, none in found]
    if answered is not None:
        answered |= {int(q): (t, references[int(q)]) for q, t in zip(names, texts, strict=True)}
    result["em"] = np.array([exact_match(t, references[int(q)]) for q, t in zip(names, texts, strict=True)])
    result["f1"] = np.array([token_f1(t, references[int(q)]) for q, t in zip(names, texts, strict=True)])
    result["questions"] = np.ones(len(names))
    return result


@dataclass(frozen=True)
class Measured:
    """One model's metrics with 95 % intervals, and the columns they were made of."""

    metrics: dict[str, Estimate]
    columns: Columns


def measured(task: TaskName, columns: Columns, *, seed: int) -> Measured:
    """Metrics of a scored model, each with its interval."""
    sums = resample_sums(columns, resamples=RESAMPLES, seed=seed)
    metrics = {}
    for name, definition in (METRICS[task] | AGAINST_TEACHER).items():
        try:
            metrics[name] = estimate(definition.of, columns, sums)
        except KeyError:  # not measured: no teacher, nothing generated, no entities
            continue
    return Measured(metrics, columns)


def value(task: TaskName, columns: Columns, name: str | None = None) -> float:
    """One metric alone, the primary one unless named."""
    sums = {name: np.asarray([c.sum()]) for name, c in columns.items()}
    with np.errstate(over="ignore"):
        return float((METRICS[task] | AGAINST_TEACHER)[name or primary(task)].of(sums)[0])


def difference(task: TaskName, first: Columns, second: Columns, name: str, *, seed: int) -> Estimate:
    """second − first in a metric, from paired resamples of the same examples."""
    return _paired(task, first, second, name, lambda a, b: b - a, seed)


def quotient(task: TaskName, first: Columns, second: Columns, name: str, *, seed: int) -> Estimate:
    """second ÷ first in a metric, from paired resamples of the same examples."""
    return _paired(task, first, second, name, lambda a, b: b / a, seed)


def _paired(
    task: TaskName,
    first: Columns,
    second: Columns,
    name: str,
    compare: Callable[[Floats, Floats], Floats],
    seed: int,
) -> Estimate:
    both = {f"a.{k}": v for k, v in first.items()} | {f"b.{k}": v for k, v in second.items()}
    sums = resample_sums(both, resamples=RESAMPLES, seed=seed)
    of = (METRICS[task] | AGAINST_TEACHER)[name].of

    def part(s: Mapping[str, Floats], prefix: str) -> dict[str, Floats]:
        return {k.removeprefix(prefix): v for k, v in s.items() if k.startswith(prefix)}

    return estimate(lambda s: compare(of(part(s, "a.")), of(part(s, "b."))), both, sums)


def better(task: TaskName, name: str | None = None) -> Callable[[float, float], bool]:
    """Whether the first value of a metric, the primary one unless named, is better than the second."""
    if (METRICS[task] | AGAINST_TEACHER)[name or primary(task)].better == "lower":
        return lambda a, b: a < b
    return lambda a, b: a > b


def generator(model: Any, tokenizer: Any, longest: int) -> Callable[[Batch], list[str]]:
    """Greedy answers of a seq2seq model, at most ``longest`` tokens."""

    def generate(batch: Batch) -> list[str]:
        inputs = {k: v for k, v in batch.inputs.items() if k in ("input_ids", "attention_mask")}
        ids = model.generate(**inputs, max_new_tokens=longest, do_sample=False, num_beams=1)
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    return generate
