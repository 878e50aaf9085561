"""Tasks: what is supervised, and that padding, batches and wrong alignments do not change or escape."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from compressor.distillation.align import class_order, shared_vocabulary
from compressor.distillation.answers import best_span, entities, exact_match, rouge_l, token_f1
from compressor.distillation.forward import RowModel, head_matches, row_loss
from compressor.distillation.fused import Objective
from compressor.distillation.losses import MASKED
from compressor.distillation.measure import measured, score, value
from compressor.distillation.tasks import DataSpec, Examples, TaskName, collate, logit_rows, read_examples
from compressor.distillation.teacher import LiveTeacher
from compressor.errors import InputRefused, UsageError

WORDS = [
    "the",
    "movie",
    "was",
    "good",
    "bad",
    "great",
    "awful",
    "film",
    "a",
    "what",
    "who",
    "made",
    "it",
    "in",
    "paris",
    "london",
    "did",
    "john",
    "mary",
    ".",
    "?",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="[SEP]",
    )  # fmt: skip


def _bert(kind: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.3, **changes,
    )  # fmt: skip
    return kind(config).eval()


DATA: dict[str, list[dict[str, Any]]] = {
    "classification": [
        {"text": "the movie was good", "label": "pos"}, {"text": "awful", "label": "neg"},
        {"text": "a great film . it was great", "label": "pos"},
    ],
    "multi-label": [
        {"text": "good", "label": ["x", "y"]}, {"text": "bad film what a bad film", "label": []},
        {"text": "a film", "label": ["y"]},
    ],
    "regression": [{"text": "good film", "label": 0.5}, {"text": "bad", "label": -1.0}, {"text": "a", "label": 0}],
    "token-classification": [
        {"tokens": ["john", "made", "it"], "tags": ["B-PER", "O", "O"]},
        {"tokens": ["mary", "in", "paris", "."], "tags": ["B-PER", "O", "B-LOC", "O"]},
    ],
    "question-answering": [
        {"question": "who made it ?", "context": "john made a film in paris .", "answers": {"text": ["john"], "answer_start": [0]}},
        {"question": "what was good", "context": "it was bad", "answers": {"text": [], "answer_start": []}},
    ],
    "masked-lm": [{"text": "the movie was good and a great film . it was great"}, {"text": "awful film"}],
    "seq2seq": [
        {"source": "the movie was good", "target": "good movie"}, {"source": "bad", "target": "what a bad film it was ."},
    ],
}  # fmt: skip

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "classification": (BertForSequenceClassification, {"num_labels": 2}),
    "multi-label": (BertForSequenceClassification, {"num_labels": 2}),
    "regression": (BertForSequenceClassification, {"num_labels": 1}),
    "token-classification": (BertForTokenClassification, {"num_labels": 3}),
    "question-answering": (BertForQuestionAnswering, {}),
    "masked-lm": (BertForMaskedLM, {}),
}


def _model(task: str) -> Any:
    if task != "seq2seq":
        kind, changes = MODELS[task]
        return _bert(kind, **changes)
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=5 + len(WORDS), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, init_std=0.3,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=3, forced_eos_token_id=3,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def _examples(task: str, tokenizer: Any, tmp_path: Path, **spec: Any) -> Examples:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, DATA[task])), "utf-8")
    return read_examples(task, DataSpec(str(file), length=32, **spec), tokenizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", list(DATA))
def test_loss_is_independent_of_batching_and_zero_for_the_teacher_itself(
    task: TaskName, tokenizer: Any, tmp_path: Path
) -> None:
    """8×1 = 1×8 over uneven lengths; identical models have no loss, and the teacher is not changed."""
    examples, model = _examples(task, tokenizer, tmp_path), _model(task)
    start = model.config.decoder_start_token_id if task == "seq2seq" else 0

    def batch_of(items: Any) -> Any:
        return collate(task, items, pad_id=0, decoder_start=start)

    whole = batch_of(examples.items)
    fused = head_matches(model, task, whole)
    assert fused == (task in ("masked-lm", "seq2seq"))
    rows = RowModel(model, model, task, fused=fused)
    other = _model(task)
    for p in other.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    teacher = LiveTeacher(RowModel(other, other, task, fused=fused), temperature=2.0, vocabulary=None)
    objective = Objective("fkl", 2.0, 0.6)

    def sums(batch: Any, teaching: LiveTeacher) -> list[float]:
        s = row_loss(task, rows(batch), batch.labels, teaching(batch), objective)
        return [s.total.item(), s.kd.item(), s.ce.item()]

    together = sums(whole, teacher)
    apart = np.sum([sums(batch_of([item]), teacher) for item in examples.items], axis=0)
    np.testing.assert_allclose(apart, together, rtol=2e-4, atol=1e-4)
    assert together[1] > 1e-3

    itself = LiveTeacher(rows, temperature=2.0, vocabulary=None)
    model.requires_grad_(True)
    s = row_loss(task, rows(whole), whole.labels, itself(whole), Objective("fkl", 2.0, 1.0))
    assert abs(s.total.item()) < 1e-4
    s.total.backward()
    assert max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None) < 1e-3
    assert all(p.grad is None for p in other.parameters())


@pytest.mark.parametrize("task", list(DATA))
def test_scores_do_not_depend_on_the_batch_size(task: TaskName, tokenizer: Any, tmp_path: Path) -> None:
    examples, model = _examples(task, tokenizer, tmp_path), _model(task)
    rows = RowModel(model, model, task, fused=task in ("masked-lm", "seq2seq"))
    one = score(rows, examples, pad_id=0, batch_size=1, teacher=rows)
    many = score(rows, examples, pad_id=0, batch_size=8, teacher=rows)
    assert one.keys() == many.keys()
    for name in one:
        np.testing.assert_allclose(one[name], many[name], rtol=1e-4, atol=1e-5, err_msg=name)
    result = measured(task, one, seed=0)
    assert abs(result.metrics["kl"].value) < 1e-5
    if task != "regression":
        assert result.metrics["agreement"].value == 1
    assert np.isfinite(value(task, one))


def test_causal_labels_begin_with_the_first_token_of_the_completion(
    tmp_path: Path, tiny_llama_dir: Path
) -> None:
    """The off-by-one probe: exactly the logits that predict completion tokens carry loss."""
    tok = AutoTokenizer.from_pretrained(tiny_llama_dir)
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "The quick brown", "completion": " fox jumps"}), "utf-8")
    spec = DataSpec(str(file), columns=(("prompt", "prompt"),), length=64)
    (example,) = read_examples("causal-lm", spec, tok).items
    prompt = tok("The quick brown")["input_ids"]
    completion = tok(" fox jumps", add_special_tokens=False)["input_ids"] + [tok.eos_token_id]
    supervised = [t for t, label in enumerate(example.labels) if label >= 0]
    assert supervised == list(range(len(prompt) - 1, len(prompt) + len(completion) - 1))
    assert [example.labels[t] for t in supervised] == completion

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    batch = collate("causal-lm", [example], pad_id=0)
    rows = RowModel(model, model, "causal-lm", fused=True)(batch)
    logits = model(batch.inputs["input_ids"]).logits[0, supervised]
    torch.testing.assert_close(rows.chunk_logits(0, 99, None), logits, rtol=1e-4, atol=1e-4)


def test_rows_without_supervision_give_a_finite_zero(tiny_llama_dir: Path, tmp_path: Path) -> None:
    tok = AutoTokenizer.from_pretrained(tiny_llama_dir)
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "The quick", "completion": " fox"}), "utf-8")
    (example,) = read_examples("causal-lm", DataSpec(str(file), columns=(("prompt", "prompt"),)), tok).items
    from dataclasses import replace

    empty = replace(example, labels=[-100] * example.length)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    rows = RowModel(model, model, "causal-lm", fused=True)
    batch = collate("causal-lm", [empty], pad_id=0)
    teacher = LiveTeacher(rows, temperature=1.0, vocabulary=None)
    loss = row_loss("causal-lm", rows(batch), batch.labels, teacher(batch), Objective(alpha=0.5))
    assert loss.total.item() == 0
    both = collate("causal-lm", [example, empty], pad_id=0)
    one = collate("causal-lm", [example], pad_id=0)
    values = [
        row_loss("causal-lm", rows(b), b.labels, None, Objective(alpha=0.0)).total.item() for b in (both, one)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_t5_head_with_its_factor_is_caught(tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=5 + len(WORDS), d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    examples = _examples("seq2seq", tokenizer, tmp_path)
    assert head_matches(model, "seq2seq", collate("seq2seq", examples.items, pad_id=0))


def test_a_head_that_is_not_what_it_seems_is_not_fused(tiny_llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    ids = torch.arange(3, 13)[None]
    example = read_like(ids[0].tolist())
    batch = collate("causal-lm", [example], pad_id=0)
    assert head_matches(model, "causal-lm", batch)
    original = model.forward
    model.forward = lambda **kw: _scaled(original(**kw))  # a model that changes its logits afterwards
    assert not head_matches(model, "causal-lm", batch)


def read_like(ids: list[int]) -> Any:
    from compressor.distillation.tasks import Example

    return Example({"input_ids": ids}, [*ids[1:], -100], "k")


def _scaled(output: Any) -> Any:
    output.logits = output.logits * 1.5
    return output


def test_question_answering_masks_what_cannot_be_an_answer(tokenizer: Any, tmp_path: Path) -> None:
    examples, model = _examples("question-answering", tokenizer, tmp_path), _model("question-answering")
    batch = collate("question-answering", examples.items, pad_id=0)
    rows = logit_rows("question-answering", model(**batch.inputs), batch)
    assert rows.shape == (4, batch.inputs["input_ids"].shape[1])
    first = examples.items[0]
    assert [first.inputs["input_ids"][label] for label in first.labels] == [
        tokenizer.convert_tokens_to_ids("john")
    ] * 2
    for example, row in zip((examples.items[0], examples.items[0]), rows[:2], strict=True):
        assert example.answerable is not None
        for at in range(len(row)):
            allowed = at < example.length and example.answerable[at]
            assert (row[at] > MASKED / 2) == allowed
    assert examples.items[1].labels == [0, 0]  # no answer: CLS


def test_labels_by_name(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, DATA["classification"])), "utf-8")
    spec = DataSpec(str(file), length=32)
    assert [e.labels for e in read_examples("classification", spec, tokenizer, ["pos", "neg"]).items] == [
        [0],
        [1],
        [0],
    ]
    with pytest.raises(InputRefused, match="row 1: label 'pos' is none of the teacher's classes"):
        read_examples("classification", spec, tokenizer, ["good", "bad"])
    assert class_order(["a", "b", "c"], ["c", "A", "b"]) == [1, 2, 0]
    assert class_order(["a", "b"], ["a", "b"]) is None
    with pytest.raises(InputRefused, match="different classes"):
        class_order(["a", "b"], ["a", "d"])


def test_missing_columns_are_named(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"review_text": "good", "label": 1}), "utf-8")
    with pytest.raises(UsageError, match="there are review_text, label"):
        read_examples("classification", DataSpec(str(file)), tokenizer)
    spec = DataSpec(str(file), columns=(("text", "review_text"),))
    assert len(read_examples("classification", spec, tokenizer)) == 1


def test_a_file_without_header(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text("good film\t1\nbad film\t0\n", "utf-8")
    examples = read_examples("classification", DataSpec(str(file), header=("text", "label")), tokenizer)
    assert [e.labels for e in examples.items] == [[1], [0]]
    assert examples.classes == ("0", "1")


class _Vocabulary:
    def __init__(self, tokens: dict[str, int]) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return self._tokens


def test_vocabularies() -> None:
    base = {f"t{i}": i for i in range(10)}
    assert shared_vocabulary(_Vocabulary(base), _Vocabulary(base), 16, 12) == 12
    assert shared_vocabulary(_Vocabulary(base | {"<new>": 10}), _Vocabulary(base), 16, 12) == 12
    with pytest.raises(InputRefused, match="1 tokens have other ids, for example 't3'"):
        shared_vocabulary(_Vocabulary(base), _Vocabulary(base | {"t3": 11}), 16, 16)
    with pytest.raises(InputRefused, match="other ids"):
        shared_vocabulary(_Vocabulary(base), _Vocabulary({k: v for k, v in base.items() if v != 4}), 16, 16)


def test_answers() -> None:
    assert exact_match("The Paris!", ["paris"]) == 1
    assert exact_match("", []) == 1
    assert token_f1("in big Paris", ["Paris"]) == pytest.approx(0.5)
    assert rouge_l("x y z", "x z") == pytest.approx(0.8)
    assert entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"]) == {
        (0, 1, "PER"),
        (3, 3, "LOC"),
        (4, 4, "LOC"),
    }
    start, end = np.array([0.0, 5, 1]), np.array([9.0, 1, 2])
    assert best_span(start, end)[:2] == (0, 0)
    assert best_span(start, np.array([-9.0, 1, 2]), longest=1)[:2] == (1, 1)
