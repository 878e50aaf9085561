"""What is supervised: how rows of data become examples, batches, and rows of logits with labels.

Every task ends in the same shape, so that losses, teachers and the loop know none of them: ``rows`` of
logits [N, C] in the order of the examples, with N labels. A row is a predicted token (language models,
tagging), a sentence (classifiers) or one end of an answer (question answering). Padding makes no rows.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.distillation.losses import MASKED
from compressor.errors import InputRefused, UsageError
from compressor.sources.rows import read_rows, read_table
from compressor.sources.text import tokenize

TaskName = Literal[
    "causal-lm",
    "seq2seq",
    "masked-lm",
    "classification",
    "multi-label",
    "regression",
    "token-classification",
    "question-answering",
]
TASKS: tuple[TaskName, ...] = get_args(TaskName)
LANGUAGE_MODELS = ("causal-lm", "seq2seq", "masked-lm")
IGNORED = -100
_MASK_SHARE = 0.15


@dataclass(frozen=True)
class Example:
    """One tokenized item. ``inputs`` are the encoder's or decoder's ids and masks, unpadded.

    ``labels``: of language models and tagging, one id a position of the input (of the target for
    seq2seq), IGNORED where nothing is supervised, already shifted for causal models (the label at t is the
    token at t + 1); of classifiers, one class (IGNORED where only the teacher answers), or a value for each label; of question answering the
    start and end position. ``answerable`` marks the positions an answer may have. ``reference`` is what
    metrics compare with. ``key`` hashes all that the teacher sees.
    """

    inputs: dict[str, list[int]]
    labels: list[Any]
    key: str
    answerable: list[bool] | None = None
    reference: Any = None

    def rows(self, task: TaskName) -> int:
        """How many rows it is supervised in."""
        match task:
            case "classification" | "multi-label" | "regression":
                return 1
            case "question-answering":
                return 2
        return sum(label != IGNORED for label in self.labels)

    @property
    def length(self) -> int:
        return len(self.inputs["input_ids"])


@dataclass(frozen=True)
class Examples:
    """A data set for a task. ``classes`` are the class names, in the order of the label ids, if it has classes.

    ``sha256`` covers all examples; ``truncated`` of them were cut.
    """

    task: TaskName
    items: tuple[Example, ...]
    classes: tuple[str, ...]
    source: str
    truncated: int
    sha256: str

    def __len__(self) -> int:
        return len(self.items)

    def subset(self, indices: Sequence[int], source: str) -> "Examples":
        """Some of the examples, as a data set of its own."""
        items = tuple(self.items[i] for i in indices)
        return Examples(self.task, items, self.classes, source, self.truncated, _digest(items))

    def extended(self, more: Sequence[Example]) -> "Examples":
        """These and ``more``."""
        items = (*self.items, *more)
        return Examples(self.task, items, self.classes, self.source, self.truncated, _digest(items))


@dataclass(frozen=True)
class DataSpec:
    """Where examples come from. ``columns`` names what each role of the task is read from (``text``,
    ``text_pair``, ``label``, ``prompt``, ``completion``, ``source``, ``target``, ``question``, ``context``, ``answers``, ``tokens``,
    ``tags``); ``header`` names the columns of a file without header line."""

    data: str
    split: str | None = None
    header: tuple[str, ...] | None = None
    columns: tuple[tuple[str, str], ...] = ()
    samples: int | None = None
    length: int = 512


@dataclass(frozen=True)
class Batch:
    """Examples padded to one length. ``inputs`` are the model's arguments, [B, T].

    ``where`` [B, T'] marks the output positions that are rows (None: one row an example), ``allowed``
    [B, T] the positions that may be answers. ``labels`` [N] are ids, or [N, C] values. ``counts``: rows of
    each example.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    counts: tuple[int, ...]
    keys: tuple[str, ...]
    where: Tensor | None = None
    allowed: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device, non_blocking=True)

        inputs = {name: value.to(device, non_blocking=True) for name, value in self.inputs.items()}
        labels = self.labels.to(device, non_blocking=True)
        return Batch(inputs, labels, self.counts, self.keys, move(self.where), move(self.allowed))


def task_of(config: dict[str, Any]) -> TaskName:
    """The task of a checkpoint, by the class that its ``config.json`` names.

    Raises UsageError when it names none of them (a bare encoder fits several tasks).
    """
    architecture = (config.get("architectures") or [""])[0]
    problem = config.get("problem_type")
    if "SequenceClassification" in architecture:
        match problem:
            case "multi_label_classification":
                return "multi-label"
            case "regression":
                return "regression"
        one_output = len(config.get("id2label") or {0: "", 1: ""}) == 1
        return "regression" if problem is None and one_output else "classification"
    for part, task in (
        ("TokenClassification", "token-classification"),
        ("QuestionAnswering", "question-answering"),
        ("MaskedLM", "masked-lm"),
    ):
        if part in architecture:
            return task  # type: ignore[return-value]
    if config.get("is_encoder_decoder"):
        return "seq2seq"
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "causal-lm"
    raise UsageError(
        f"a {architecture or 'model without architecture'} fits no task by itself: name one with --task ({', '.join(TASKS)})"
    )


# ---- data → examples


def read_examples(
    task: TaskName, spec: DataSpec, tokenizer: Any, classes: Sequence[str] | None = None, seed: int = 0
) -> Examples:
    """Read and tokenize. ``classes`` are the teacher's class names; without them they come from the data.

    Raises InputRefused when no example is usable or a label is none of ``classes``, UsageError for columns
    that are missing.
    """
    if task in ("causal-lm", "masked-lm") and "prompt" not in dict(spec.columns):
        return _running_text(task, spec, tokenizer, seed)
    table = read_table(spec.data, split=spec.split, header=spec.header)
    reader = _Reader(spec, table)
    names: tuple[str, ...] = ()
    match task:
        case "causal-lm":
            items = _completions(reader, tokenizer)
        case "seq2seq":
            items = _pairs(reader, tokenizer)
        case "classification" | "multi-label" | "regression":
            items, names = _sentences(task, reader, tokenizer, classes)
        case "token-classification":
            items, names = _tagged(reader, tokenizer, classes)
        case "question-answering":
            items = _questions(reader, tokenizer)
        case _:
            raise UsageError(f"{task} reads plain text, not columns: leave out prompt")
    items = [item for item in items if item.rows(task)]
    if not items:
        raise InputRefused(f"{spec.data}: holds no usable example for {task}")
    return Examples(task, tuple(items), names, spec.data, reader.truncated, _digest(items))


class _Reader:
    """Columns by role, cut to the samples that were asked for."""

    def __init__(self, spec: DataSpec, table: dict[str, Sequence[Any]]) -> None:
        self.spec, self._table, self._names = spec, table, dict(spec.columns)
        self.truncated = 0

    def column(self, role: str, *usual: str) -> list[Any]:
        found = self.optional(role, *usual)
        if found is None:
            raise UsageError(
                f"{self.spec.data}: which column is the {role}? Name it with --column {role}=NAME; there are {', '.join(self._table)}"
            )
        return found

    def optional(self, role: str, *usual: str) -> list[Any] | None:
        asked = self._names.get(role)
        if asked is not None and asked not in self._table:
            raise UsageError(
                f"{self.spec.data}: has no column {asked} for the {role}; there are {', '.join(self._table)}"
            )
        name = asked or next((n for n in (role, *usual) if n in self._table), None)
        return None if name is None else list(self._table[name])[: self.spec.samples]


def _running_text(task: TaskName, spec: DataSpec, tokenizer: Any, seed: int) -> Examples:
    rows = read_rows(spec.data, column=dict(spec.columns).get("text"), split=spec.split)
    # An encoder reads items one by one; a decoder windows of running text, or whole conversations.
    packing: Literal["rows", "auto"] = "rows" if task == "masked-lm" and not rows.document else "auto"
    tokens = tokenize(
        rows,
        tokenizer,
        samples=spec.samples or 1_000_000,
        sequence_length=spec.length,
        packing=packing,
        seed=seed,
    )
    items = []
    for index, (row, mask) in enumerate(zip(tokens.input_ids, tokens.attention_mask, strict=True)):
        ids = row[mask].tolist()
        if task == "causal-lm":
            items.append(example_of({"input_ids": ids}, [*ids[1:], IGNORED]))
        else:
            items.append(_masked(ids, tokenizer, np.random.default_rng([seed, index])))
    items = [item for item in items if item.rows(task)]
    if not items:
        raise InputRefused(f"{spec.data}: its texts are too short to learn from")
    return Examples(task, tuple(items), (), spec.data, tokens.report.rows_truncated, _digest(items))


def _masked(ids: list[int], tokenizer: Any, rng: np.random.Generator) -> Example:
    """BERT's objective on 15 % of the ordinary tokens: 80 % masked, 10 % random, 10 % as they were.

    The choice is fixed for an example, so that a cached teacher has seen what the student sees.
    """
    if tokenizer.mask_token_id is None:
        raise InputRefused("the tokenizer has no mask token, which masked language models learn by")
    special = set(tokenizer.all_special_ids)
    ordinary = [at for at, token in enumerate(ids) if token not in special]
    labels, shown = [IGNORED] * len(ids), list(ids)
    count = max(1, round(_MASK_SHARE * len(ordinary))) if ordinary else 0
    for at in rng.choice(ordinary, size=count, replace=False).tolist() if count else []:
        labels[at] = ids[at]
        draw = rng.random()
        if draw < 0.8:
            shown[at] = tokenizer.mask_token_id
        elif draw < 0.9:
            shown[at] = int(rng.integers(len(tokenizer)))
    return example_of({"input_ids": shown}, labels)


def _completions(reader: _Reader, tokenizer: Any) -> list[Example]:
    """Prompts with completions: only the completion and its end are supervised."""
    prompts, completions = reader.column("prompt"), reader.column("completion", "response", "answer")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    items = []
    for prompt, completion in zip(prompts, completions, strict=True):
        start = tokenizer(str(prompt))["input_ids"]
        start = start[:-1] if end and start and start[-1] == end[0] else start
        answer = tokenizer(str(completion), add_special_tokens=False)["input_ids"] + end
        ids = (start + answer)[: reader.spec.length]
        reader.truncated += len(ids) < len(start) + len(answer)
        # The last token of the prompt predicts the first of the completion.
        labels = [ids[t + 1] if t + 1 >= len(start) else IGNORED for t in range(len(ids) - 1)]
        items.append(example_of({"input_ids": ids}, [*labels, IGNORED]))
    return items


def _pairs(reader: _Reader, tokenizer: Any) -> list[Example]:
    sources = reader.column("source", "text", "document", "article", "input")
    targets = reader.column("target", "summary", "highlights", "output")
    length = reader.spec.length
    items = []
    for source, target in zip(sources, targets, strict=True):
        inputs = tokenizer(str(source), truncation=True, max_length=length)["input_ids"]
        labels = tokenizer(text_target=str(target), truncation=True, max_length=length)["input_ids"]
        items.append(example_of({"input_ids": inputs}, labels, reference=str(target)))
    return items


def _sentences(
    task: TaskName, reader: _Reader, tokenizer: Any, classes: Sequence[str] | None
) -> tuple[list[Example], tuple[str, ...]]:
    texts = reader.column("text", "sentence", "sentence1", "premise", "question", "review")
    pairs = reader.optional("text_pair", "sentence2", "hypothesis", "question2")
    values = reader.column("label", "labels", "score")
    names: tuple[str, ...] = ()
    if task == "regression":
        labels = [_numbers(reader, row, value) for row, value in enumerate(values, 1)]
    elif task == "multi-label":
        names = tuple(classes or sorted({str(v) for value in values for v in _listed(value)}))
        index = {name: i for i, name in enumerate(names)}
        labels = []
        for row, value in enumerate(values, 1):
            on = {_class_of(reader, row, v, index) for v in _listed(value)}
            labels.append([float(i in on) for i in range(len(names))])
    else:
        names = tuple(classes or sorted({str(value) for value in values}, key=_numeric_order))
        index = {name: i for i, name in enumerate(names)}
        labels = [[_class_of(reader, row, value, index)] for row, value in enumerate(values, 1)]
    items = []
    for at, (text, label) in enumerate(zip(texts, labels, strict=True)):
        pair = None if pairs is None else str(pairs[at])
        full = tokenizer(str(text), pair, truncation=True, max_length=reader.spec.length)
        reader.truncated += len(full["input_ids"]) == reader.spec.length
        inputs = {k: list(full[k]) for k in ("input_ids", "token_type_ids") if k in full}
        items.append(example_of(inputs, label, reference=label))
    return items, names


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _numbers(reader: _Reader, row: int, value: Any) -> list[float]:
    try:
        return [float(v) for v in _listed(value)]
    except (TypeError, ValueError):
        raise InputRefused(
            f"{reader.spec.data}: row {row}: {value!r} is not a number to regress on"
        ) from None


def _numeric_order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.lstrip("-").isdigit() else (1 << 62, name)


def _class_of(reader: _Reader, row: int, value: Any, index: dict[str, int]) -> int:
    """A class by name. Numbers are accepted as ids where the model's names say nothing (LABEL_0 …)."""
    name = str(value)
    if name in index:
        return index[name]
    if name.isdigit() and int(name) < len(index) and (f"LABEL_{name}" in index or not isinstance(value, str)):
        return index.get(f"LABEL_{name}", int(name))
    raise InputRefused(
        f"{reader.spec.data}: row {row}: label {name!r} is none of the teacher's classes {', '.join(index)}"
    )


def _tagged(
    reader: _Reader, tokenizer: Any, classes: Sequence[str] | None
) -> tuple[list[Example], tuple[str, ...]]:
    """The first token of a word carries the word's tag; its other tokens are not supervised."""
    sentences, tags = reader.column("tokens", "words"), reader.column("tags", "ner_tags", "labels")
    sentences = [words.split() if isinstance(words, str) else words for words in sentences]
    tags = [tag.split() if isinstance(tag, str) else tag for tag in tags]
    names = tuple(classes or sorted({str(tag) for row in tags for tag in row}, key=_numeric_order))
    index = {name: i for i, name in enumerate(names)}
    if not tokenizer.is_fast:
        raise InputRefused("tagging needs a fast tokenizer, which knows the words of its tokens")
    items = []
    for row, (words, word_tags) in enumerate(zip(sentences, tags, strict=True), 1):
        if len(words) != len(word_tags):
            raise InputRefused(
                f"{reader.spec.data}: row {row} has {len(words)} words and {len(word_tags)} tags"
            )
        full = tokenizer(words, is_split_into_words=True, truncation=True, max_length=reader.spec.length)
        labels, previous = [], None
        for word in full.word_ids():
            first = word is not None and word != previous
            labels.append(_class_of(reader, row, word_tags[word], index) if first else IGNORED)
            previous = word
        reader.truncated += previous is not None and max(
            w for w in full.word_ids() if w is not None
        ) + 1 < len(words)
        items.append(example_of({"input_ids": list(full["input_ids"])}, labels))
    return items, names


def _questions(reader: _Reader, tokenizer: Any) -> list[Example]:
    """SQuAD: each feature of a long context is an example; where it lacks the answer, CLS is the answer."""
    questions, contexts = reader.column("question"), reader.column("context")
    answers = reader.column("answers")
    if not tokenizer.is_fast:
        raise InputRefused("question answering needs a fast tokenizer, which knows where its tokens are")
    items = []
    for number, (question, context, answer) in enumerate(zip(questions, contexts, answers, strict=True)):
        full = tokenizer(
            str(question).strip(), str(context), truncation="only_second", max_length=reader.spec.length,
            stride=min(128, reader.spec.length // 4), return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        texts, starts = answer.get("text") or [], answer.get("answer_start") or []
        for feature in range(len(full["input_ids"])):
            ids, offsets = full["input_ids"][feature], full["offset_mapping"][feature]
            cls = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
            inside = [part == 1 for part in full.sequence_ids(feature)]
            span = [cls, cls]
            if texts:
                begin, stop = starts[0], starts[0] + len(texts[0])
                tokens = [
                    t for t, on in enumerate(inside) if on and offsets[t][0] < stop and offsets[t][1] > begin
                ]
                covered = tokens and offsets[tokens[0]][0] <= begin and offsets[tokens[-1]][1] >= stop
                span = [tokens[0], tokens[-1]] if covered else span
            inputs = {"input_ids": ids}
            if "token_type_ids" in full:
                inputs["token_type_ids"] = full["token_type_ids"][feature]
            answerable = [on or t == cls for t, on in enumerate(inside)]
            reference = {
                "question": number, "answers": texts, "context": str(context), "cls": cls,
                "offsets": [o if on else None for o, on in zip(offsets, inside, strict=True)],
            }  # fmt: skip
            items.append(example_of(inputs, span, answerable=answerable, reference=reference))
    return items


def example_of(
    inputs: dict[str, list[int]],
    labels: list[Any],
    *,
    answerable: list[bool] | None = None,
    reference: Any = None,
) -> Example:
    """An example with its key."""
    digest = hashlib.sha256(repr((sorted(inputs.items()), labels, answerable)).encode())
    return Example(inputs, labels, digest.hexdigest()[:32], answerable, reference)


def _digest(items: Sequence[Example]) -> str:
    return hashlib.sha256("".join(item.key for item in items).encode()).hexdigest()


# ---- examples → batch


def collate(task: TaskName, examples: Sequence[Example], *, pad_id: int, decoder_start: int = 0) -> Batch:
    """Pad to the longest; the model's output does not depend on how far. ``decoder_start`` begins seq2seq targets."""
    length = max(example.length for example in examples)
    mask = torch.zeros(len(examples), length, dtype=torch.long)
    inputs: dict[str, Tensor] = {}
    for name in examples[0].inputs:
        fill = pad_id if name == "input_ids" else 0
        inputs[name] = torch.full((len(examples), length), fill, dtype=torch.long)
        for row, example in enumerate(examples):
            inputs[name][row, : example.length] = torch.tensor(example.inputs[name])
    for row, example in enumerate(examples):
        mask[row, : example.length] = 1
    if not mask.all():  # attention without a mask takes faster paths
        inputs["attention_mask"] = mask
    keys = tuple(example.key for example in examples)
    counts = tuple(example.rows(task) for example in examples)
    match task:
        case "classification":
            return Batch(inputs, torch.tensor([e.labels[0] for e in examples]), counts, keys)
        case "multi-label" | "regression":
            values = torch.tensor([e.labels for e in examples], dtype=torch.float32)
            return Batch(inputs, values, counts, keys)
        case "question-answering":
            allowed = torch.zeros(len(examples), length, dtype=torch.bool)
            for row, example in enumerate(examples):
                assert example.answerable is not None
                allowed[row, : example.length] = torch.tensor(example.answerable)
            labels = torch.tensor([label for e in examples for label in e.labels])
            return Batch(inputs, labels, counts, keys, allowed=allowed)
    width = max(len(example.labels) for example in examples)
    labels = torch.full((len(examples), width), IGNORED)
    for row, example in enumerate(examples):
        labels[row, : len(example.labels)] = torch.tensor(example.labels)
    where = labels != IGNORED
    if task == "seq2seq":
        shifted = torch.full_like(labels, pad_id)
        shifted[:, 0] = decoder_start
        shifted[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad_id)
        inputs["decoder_input_ids"] = shifted
    return Batch(inputs, labels[where], counts, keys, where=where)


def logit_rows(task: TaskName, output: Any, batch: Batch) -> Tensor:
    """The rows [N, C] of a model's output. Question answering: start and end of each example in turn, over
    positions, those that cannot be answers at ``MASKED``."""
    if task == "question-answering":
        assert batch.allowed is not None
        both = torch.stack([output.start_logits, output.end_logits], dim=1).float()
        return both.masked_fill(~batch.allowed[:, None], MASKED).flatten(0, 1)
    logits: Tensor = output.logits
    return logits if batch.where is None else logits[batch.where]


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows of examples under one another, [Σ n_i, max C_i], filled up with ``MASKED``."""
    width = max(part.shape[-1] for part in rows)
    return torch.cat([F.pad(part, (0, width - part.shape[-1]), value=MASKED) for part in rows])
