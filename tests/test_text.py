"""Reading data sets and turning them into token sequences."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from compressor.errors import InputRefused, UsageError
from compressor.sources import rows as rows_module
from compressor.sources import text as text_module
from compressor.sources.text import Rows, read_rows, tokenize

CHAT = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello, dog"}]
PROSE = "The quick brown fox jumps over the lazy dog.\nPack my box with five dozen jugs.\n\n"
TURNS = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '</s>' }}{% endfor %}"


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def tokenizer_with(*, adds_bos: bool = False, chat_template: str | None = None, **special: str) -> Any:
    tokenizer = make_tokenizer(**special)
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    tokenizer.chat_template = chat_template
    return tokenizer


def text_rows(*texts: str, document: bool = False) -> Rows:
    return Rows("data", texts, None, len(texts), 0, "", document)


def chat_rows(*chats: list[dict[str, Any]]) -> Rows:
    return Rows("data", None, chats, len(chats), 0, "", False)


# ---- reading


def test_text_file_is_one_document_whatever_its_line_ends_and_bom(tmp_path: Path) -> None:
    plain = read_rows(write(tmp_path / "a.txt", "é one\n\ntwo\n"))
    windows = read_rows(write(tmp_path / "b.md", "\ufeffé one\r\n\r\ntwo\r\n"))
    assert plain.texts == ("é one\n\ntwo\n",)
    assert plain.document
    assert plain.read == 1
    assert windows.texts == plain.texts
    assert windows.sha256 == plain.sha256


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_json_lines_with_bom_and_blank_lines(tmp_path: Path, ends: str) -> None:
    lines = [
        '{"text": "one\u2028still one"}',
        "",
        '{"text": "  "}',
        '{"text": null}',
        '{"id": 3}',
        '{"text": "two"}',
    ]
    rows = read_rows(write(tmp_path / "a.jsonl", "\ufeff" + ends.join(lines) + ends * 2))
    assert rows.texts == ("one\u2028still one", "two")
    assert (rows.read, rows.dropped, rows.document) == (5, 3, False)


def test_hash_is_of_the_rows_not_of_the_file(tmp_path: Path) -> None:
    one = read_rows(write(tmp_path / "a.jsonl", '{"text": "ab"}\n'))
    same = read_rows(write(tmp_path / "b.csv", "id,text\n1,ab\n"))
    two = read_rows(write(tmp_path / "c.jsonl", '{"text": "a"}\n{"text": "b"}\n'))
    assert one.sha256 == same.sha256 != two.sha256
    assert len(one.sha256) == 64


@pytest.mark.parametrize(
    "content",
    [
        [{"text": "one"}, {"text": "two"}],
        {"text": ["one", "two"], "id": [1, 2]},
        {"version": 1, "data": [{"text": "one"}, {"text": "two"}]},
        ["one", "two"],
    ],
)
def test_json_shapes(tmp_path: Path, content: Any) -> None:
    assert read_rows(write(tmp_path / "a.json", json.dumps(content, indent=1))).texts == ("one", "two")


def test_json_lines_named_json(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path / "a.json", '{"text": "one"}\n{"text": "two"}\n')).texts == ("one", "two")


def test_csv_with_quoted_line_break_long_cell_and_blank_line(tmp_path: Path) -> None:
    long = "word " * 40_000
    before = csv.field_size_limit()
    rows = read_rows(
        write(tmp_path / "a.csv", f'\ufeffid,text\r\n1,"a ""b""\r\nc"\r\n\r\n2,{long}\r\n3,\r\n')
    )
    assert rows.texts == ('a "b"\nc', long)
    assert (rows.read, rows.dropped) == (3, 1)
    assert csv.field_size_limit() == before
    assert read_rows(write(tmp_path / "a.tsv", "text\tid\none, two\t1\n")).texts == ("one, two",)


def test_parquet_with_text_and_with_messages(tmp_path: Path) -> None:
    table = pyarrow.table({"id": [1, 2, 3], "text": ["one", None, "two"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = read_rows(str(tmp_path / "a.parquet"))
    assert rows.texts == ("one", "two")
    assert (rows.read, rows.dropped) == (3, 1)
    pyarrow.parquet.write_table(pyarrow.table({"messages": [CHAT, []]}), tmp_path / "b.parquet")
    rows = read_rows(str(tmp_path / "b.parquet"))
    assert rows.texts is None
    assert rows.chats == (CHAT,)
    assert rows.dropped == 1


def test_saved_data_set_and_its_splits(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"text": ["one", ""]})
    one.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": one, "test": one.select([0])}).save_to_disk(str(tmp_path / "both"))
    assert read_rows(str(tmp_path / "single")).dropped == 1
    assert read_rows(str(tmp_path / "both"), split="test").read == 1
    with pytest.raises(UsageError, match="choose a split with --split: train, test"):
        read_rows(str(tmp_path / "both"))
    with pytest.raises(UsageError, match="no split dev; its splits are train, test"):
        read_rows(str(tmp_path / "both"), split="dev")
    with pytest.raises(UsageError, match="no splits"):
        read_rows(str(tmp_path / "single"), split="test")
    (tmp_path / "single" / "data-00000-of-00001.arrow").write_bytes(b"cut")
    with pytest.raises(InputRefused, match="cannot be read as a saved data set"):
        read_rows(str(tmp_path / "single"))
    with pytest.raises(InputRefused, match="not a directory written by"):
        read_rows(str(tmp_path))


def test_hub_loading_code_on_a_local_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # datasets treats a directory of files as it treats a repository of the hub.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "repository"
    repository.mkdir()
    write(repository / "train.csv", "text\none\ntwo\n")
    write(repository / "test.csv", "text\nthree\n")
    table = rows_module._hub_table(str(repository), "test", None)
    assert table.get is not None
    assert list(table.get("text")) == ["three"]
    with pytest.raises(UsageError, match="choose a split"):
        rows_module._hub_table(str(repository), None, None)
    monkeypatch.setattr(rows_module, "_STREAM_BYTES", -1)
    monkeypatch.setattr(rows_module, "_STREAM_ROWS", 1)
    table = rows_module._hub_table(str(repository), "train", None)
    assert table.get is not None
    assert list(table.get("text")) == ["one"]
    assert "only its first 1 rows were read" in table.warnings[0]


def test_unknown_hub_id_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputRefused, match="neither a local path nor a data set") as caught:
        read_rows("nobody/no-such-data-set:config", split="test")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n\n{"text": "tw', "a.jsonl: line 3 is not JSON"),
        ("a.jsonl", '{"text": "one"}\n17\n', "a.jsonl: line 2 is not an object"),
        ("a.jsonl", '"one"\n{"text": "two"}\n', "a.jsonl: line 2 is not a string"),
        ("a.jsonl", "[" * 100_000, "a.jsonl: line 1 is not JSON"),
        ("a.jsonl", "\n\n", "a.jsonl: holds no rows"),
        ("a.json", '[\n{"text": "one"},\n', "a.json: line 3 is not JSON"),
        ("a.json", '{"text": ["a", "b"], "id": [1]}', "a.json: its columns have different lengths"),
        ("a.json", "17", "a.json: expected a list"),
        ("a.json", "[1, 2]", "a.json: row 1 is not an object"),
        ("a.csv", "id,text\n1,one\n2,two,three\n", "a.csv: line 3 has 3 cells where the header has 2"),
        ("a.csv", 'id,text\n1,"one\n2,two\n', "a.csv: line 3 cannot be read as CSV"),
        ("a.csv", "id,text\n", "a.csv: holds no rows"),
        ("a.csv", "text,text\n1,2\n", "a.csv: its header names a column twice"),
        ("a.parquet", "PAR1 no", "a.parquet: cannot be read as Parquet"),
        ("a.txt", b"one\ntwo \xff\n", "a.txt: line 2 is not UTF-8"),
        ("a.txt", "one\ntwo\0\n", "a.txt: line 2 holds a NUL"),
        ("a.txt", " \r\n", "a.txt: none of its 1 rows holds any text"),
        ("a.jsonl", '{"text": ""}\n{"text": 3}\n{"text": "\\ud83d"}\n', "none of its 3 rows holds any text"),
        ("a.jsonl", '{"messages": []}\n', "none of its 1 rows is a conversation"),
        ("a.pkl", "x", "a.pkl: text data is one of"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(InputRefused) as caught:
        read_rows(write(tmp_path / name, content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_options_that_do_not_apply(tmp_path: Path) -> None:
    for ref in (str(tmp_path / "none.txt"), "none.jsonl", "./none", "a/b/c"):
        with pytest.raises(InputRefused, match="no such file or directory"):
            read_rows(ref)
    file = write(tmp_path / "a.txt", "one")
    for options in ({"column": "text"}, {"split": "test"}, {"revision": "main"}):
        with pytest.raises(UsageError, match="does not apply"):
            read_rows(file, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has the splits train, calibration, test"):
        read_rows("builtin:validation")


def test_columns_found_named_missing_and_ambiguous(tmp_path: Path) -> None:
    both = write(tmp_path / "both.jsonl", json.dumps({"text": "t", "messages": CHAT, "prompt": "p"}))
    with pytest.raises(UsageError, match="choose a column with --column: text, messages could all be meant"):
        read_rows(both)
    assert read_rows(both, column="prompt").texts == ("p",)
    assert read_rows(both, column="messages").chats == (CHAT,)
    with pytest.raises(UsageError, match="has no column body; its columns are text, messages, prompt"):
        read_rows(both, column="body")
    chat = write(tmp_path / "chat.jsonl", json.dumps({"prompt": "p", "messages": CHAT}))
    assert read_rows(chat).chats == (CHAT,)
    other = write(tmp_path / "other.jsonl", json.dumps({"foo": "f", "bar": "b"}))
    with pytest.raises(UsageError, match="name the text column with --column; its columns are foo, bar"):
        read_rows(other)
    assert read_rows(write(tmp_path / "one.jsonl", '{"foo": "f"}')).texts == ("f",)


def test_conversations_are_normalised(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello, dog"}]},
        {"conversations": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}]},
        {"conversations": {"role": ["user"], "content": ["Hi"]}},
        {"conversations": [{"from": "martian", "value": "Hi"}]},
        {"conversations": [{"role": "user", "content": " "}]},
        {"conversations": "Hi"},
    ]
    read = read_rows(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert read.chats == (CHAT, [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}])
    assert (read.read, read.dropped) == (6, 3)
    bare = read_rows(write(tmp_path / "b.jsonl", json.dumps(CHAT)))
    assert bare.chats == (CHAT,)


# ---- packing


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1, max_size=60).filter(str.strip), min_size=1, max_size=8),
    length=st.integers(2, 12),
    samples=st.integers(1, 6),
    adds_bos=st.booleans(),
)
def test_windows_are_consecutive_slices_of_the_joined_text(
    texts: list[str], length: int, samples: int, adds_bos: bool
) -> None:
    tokenizer = tokenizer_with(adds_bos=adds_bos)
    whole = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    body = length - adds_bos
    expected = [whole[at : at + body] for at in range(0, len(whole) - body + 1, body)][:samples]
    if not expected:
        with pytest.raises(InputRefused, match=f"its {len(whole)} tokens do not fill one sequence"):
            tokenize(text_rows(*texts), tokenizer, samples=samples, sequence_length=length)
        return
    tokens = tokenize(text_rows(*texts), tokenizer, samples=samples, sequence_length=length)
    got = tokens.input_ids[:, int(adds_bos) :].tolist()
    assert got == expected
    assert not adds_bos or (tokens.input_ids[:, 0] == 1).all()
    assert tokens.attention_mask.all()
    assert tokens.report.tokens == tokens.input_ids.numel()
    assert bool(tokens.report.warnings) == (len(expected) < samples)


def test_rows_used_counts_rows_that_reached_a_window() -> None:
    tokenizer = make_tokenizer()
    rows = text_rows(*["jugs " * 10] * 9)
    per_row = len(tokenizer("jugs " * 10 + "\n\n")["input_ids"])
    report = tokenize(rows, tokenizer, samples=1, sequence_length=2 * per_row + 1).report
    assert (report.rows_read, report.rows_used, report.packing) == (9, 3, "concat")
    assert (report.sequences, report.requested, report.rows_truncated) == (1, 1, 0)


@pytest.mark.parametrize("per_token", [1, 8])
def test_long_text_gives_the_same_first_windows_as_all_of_it(
    monkeypatch: pytest.MonkeyPatch, per_token: int
) -> None:
    tokenizer = make_tokenizer()
    text = "".join(f"{number} {PROSE}" for number in range(2000))
    whole = tokenizer(text)["input_ids"]
    monkeypatch.setattr(text_module, "_CHARACTERS_PER_TOKEN", per_token)
    tokens = tokenize(text_rows(text, document=True), tokenizer, samples=5, sequence_length=64)
    assert tokens.input_ids.flatten().tolist() == whole[: 5 * 64]


@pytest.mark.parametrize("repeats", [40, 4000])  # tokenized whole, and by excerpts
def test_spread_windows_come_from_all_over_the_text(monkeypatch: pytest.MonkeyPatch, repeats: int) -> None:
    tokenizer = make_tokenizer()
    rows = text_rows(*[f"{number} {PROSE}" for number in range(repeats)])
    text = "\n\n".join(rows.texts or ())
    seen: list[int] = []
    original = text_module._ids_and_places

    def counted(tokenizer: Any, text: str, starts: Any) -> Any:
        seen.append(len(text))
        return original(tokenizer, text, starts)

    monkeypatch.setattr(text_module, "_ids_and_places", counted)
    sets = [
        tokenize(rows, tokenizer, samples=8, sequence_length=64, pick="spread", seed=seed)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(sets[0].input_ids, sets[1].input_ids)
    assert not torch.equal(sets[0].input_ids, sets[2].input_ids)
    places = [text.index(tokenizer.decode(ids[1:-1])) / len(text) for ids in sets[0].input_ids]
    assert places == sorted(places)
    assert np.diff([0.0, *places, 1.0]).max() < 0.26  # one of each eighth, wherever in it
    if repeats == 4000:
        assert sum(seen) <= len(sets) * 8 * 64 * text_module._CHARACTERS_PER_TOKEN < len(text)


def test_rows_packing_pads_and_counts_truncated_rows() -> None:
    tokenizer = make_tokenizer()
    rows = text_rows("The quick brown fox", "jugs " * 40, "dog")
    tokens = tokenize(rows, tokenizer, samples=9, sequence_length=20, packing="rows")
    for ids, mask, text in zip(tokens.input_ids, tokens.attention_mask, rows.texts or (), strict=True):
        assert ids[mask].tolist() == tokenizer(text)["input_ids"][:20]
        assert (ids[~mask] == tokenizer.pad_token_id).all()
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
    report = tokens.report
    assert (report.rows_used, report.rows_truncated, report.sequences) == (3, 1, 3)
    assert report.tokens == int(tokens.attention_mask.sum())
    assert report.warnings == ("data: 3 sequences where 9 were asked for",)
    assert tokens.input_ids.dtype == torch.long
    assert tokens.attention_mask.dtype == torch.bool


def test_rows_picked_by_seed_keep_the_order_of_the_data() -> None:
    tokenizer = make_tokenizer()
    rows = text_rows(*(f"row {number}" for number in range(100)))

    def picked(seed: int) -> list[int]:
        tokens = tokenize(
            rows, tokenizer, samples=10, sequence_length=16, packing="rows", pick="spread", seed=seed
        )
        decoded = tokenizer.batch_decode(tokens.input_ids, skip_special_tokens=True)
        return [int(text.split()[1]) for text in decoded]

    assert picked(0) == picked(0) == sorted(picked(0)) != picked(1)


@pytest.mark.parametrize("special", [{"bos_token": "<s>"}, {"bos_token": "<s>", "eos_token": "</s>"}])
def test_tokenizer_without_pad_or_eos(special: dict[str, str]) -> None:
    tokenizer = tokenizer_with(**special)
    assert tokenizer.pad_token_id is None
    tokens = tokenize(text_rows("dog", PROSE), tokenizer, samples=2, sequence_length=32, packing="rows")
    pad = 2 if "eos_token" in special else 0
    assert (tokens.input_ids[~tokens.attention_mask] == pad).all()
    assert not tokens.attention_mask.all()
    assert tokenizer.pad_token_id is None


def test_tokenizer_written_in_python_agrees_to_the_row() -> None:
    class Slow:
        """As a SentencePiece backend: same ids, no offsets."""

        is_fast = False
        bos_token_id = sep_token_id = cls_token_id = pad_token_id = None
        eos_token_id = 2

        def __init__(self) -> None:
            self._fast = make_tokenizer()

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [self._fast(text)["input_ids"] for text in texts]}

    rows = text_rows("one dog", "two dogs", "three dogs", "four")
    report = tokenize(rows, Slow(), samples=1, sequence_length=8).report
    assert report == tokenize(rows, make_tokenizer(), samples=1, sequence_length=8).report
    assert report.rows_used == 2


def test_lengths_that_leave_no_room() -> None:
    with pytest.raises(UsageError, match="no room beside the special tokens"):
        tokenize(text_rows(PROSE), tokenizer_with(adds_bos=True), samples=1, sequence_length=1)
    with pytest.raises(UsageError, match="at least 1"):
        tokenize(text_rows(PROSE), make_tokenizer(), samples=0, sequence_length=8)


# ---- BOS and chat templates


@pytest.mark.parametrize("packing", ["concat", "rows"])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_plain_text_gets_one_bos_where_the_tokenizer_uses_one(
    packing: Any, adds_bos: bool, written: bool
) -> None:
    tokenizer = tokenizer_with(adds_bos=adds_bos)
    rows = text_rows(*[("<s>" if written else "") + PROSE] * 3)
    tokens = tokenize(rows, tokenizer, samples=3, sequence_length=32, packing=packing)
    firsts = (tokens.input_ids[:, 0] == 1).tolist()
    if adds_bos or packing == "rows":
        assert firsts == [adds_bos or written] * len(firsts)
        assert (tokens.input_ids == 1).sum() == sum(firsts)
    state = (
        "already present" if written and (adds_bos or packing == "rows") else "added" if adds_bos else "none"
    )
    assert tokens.report.bos == state


def test_bos_policy_can_be_forced() -> None:
    rows = text_rows(PROSE)
    always = tokenize(rows, make_tokenizer(), samples=1, sequence_length=8, bos="always")
    never = tokenize(rows, tokenizer_with(adds_bos=True), samples=1, sequence_length=8, bos="never")
    assert always.input_ids[0, 0] == 1
    assert never.input_ids[0, 0] != 1
    assert (always.report.bos, never.report.bos) == ("added", "none")
    with pytest.raises(InputRefused, match="no BOS token"):
        tokenize(rows, make_tokenizer(eos_token="</s>"), samples=1, sequence_length=8, bos="always")


def test_encoder_windows_are_framed_by_cls_and_sep() -> None:
    tokenizer = make_tokenizer(cls_token="<s>", sep_token="</s>", pad_token="<pad>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    for packing in ("concat", "rows"):
        tokens = tokenize(text_rows(PROSE), tokenizer, samples=2, sequence_length=16, packing=packing)  # type: ignore[arg-type]
        assert (tokens.input_ids[:, 0] == 1).all()
        assert (tokens.input_ids[:, -1] == 2).all()
        assert tokens.input_ids.shape[1] == 16


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("written", ["", "<s>", "<s><s>"])
@pytest.mark.parametrize("packing", ["auto", "concat"])
def test_conversations_get_exactly_one_bos(adds_bos: bool, written: str, packing: Any) -> None:
    tokenizer = tokenizer_with(adds_bos=adds_bos, chat_template=written + TURNS)
    tokens = tokenize(chat_rows(CHAT, CHAT[:1]), tokenizer, samples=2, sequence_length=32, packing=packing)
    if packing == "auto":
        wanted = adds_bos or bool(written)
        assert tokens.report.packing == "rows"
        assert (tokens.input_ids == 1).sum(dim=1).tolist() == [int(wanted)] * 2
        assert ((tokens.input_ids[:, 0] == 1) == wanted).all()
        text = tokenizer.decode(tokens.input_ids[0][tokens.attention_mask[0]])
        assert text == ("<s>" if wanted else "") + "[user]Hi there</s>[assistant]Hello, dog</s>"
        assert tokens.report.bos == ("already present" if written else "added" if adds_bos else "none")
    elif adds_bos:
        assert (tokens.input_ids == 1).sum(dim=1).tolist() == [1] * len(tokens.input_ids)
        assert (tokens.input_ids[:, 0] == 1).all()


def test_conversation_joins_keep_every_turn() -> None:
    tokenizer = tokenizer_with(chat_template=TURNS)
    chats = [[{"role": "user", "content": f"dog {number}"}] for number in range(20)]
    tokens = tokenize(chat_rows(*chats), tokenizer, samples=4, sequence_length=24, packing="concat")
    joined = "".join(f"[user]dog {number}</s>" for number in range(20))
    assert tokenizer.decode(tokens.input_ids.flatten().tolist()) == tokenizer.decode(
        tokenizer(joined)["input_ids"][: tokens.input_ids.numel()]
    )
    per_chat = np.cumsum([len(tokenizer(f"[user]dog {number}</s>")["input_ids"]) for number in range(20)])
    assert tokens.report.rows_used == int(np.searchsorted(per_chat, tokens.input_ids.numel())) + 1


def test_conversations_without_a_template_are_refused() -> None:
    with pytest.raises(InputRefused, match="no chat template"):
        tokenize(chat_rows(CHAT), make_tokenizer(), samples=1, sequence_length=32)


def test_conversations_the_template_refuses_are_dropped_and_counted() -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TURNS
    tokenizer = tokenizer_with(chat_template=strict)
    report = tokenize(chat_rows(CHAT, CHAT[1:], CHAT), tokenizer, samples=2, sequence_length=32).report
    assert (report.rows_used, report.rows_dropped) == (2, 1)
    assert report.warnings == ("data: the chat template refused 1 rows (user first)",)
    with pytest.raises(InputRefused, match="takes none of its conversations"):
        tokenize(chat_rows(CHAT[1:]), tokenizer, samples=2, sequence_length=32)


# ---- the tokenizer is left alone


def test_truncation_and_padding_of_the_tokenizer_are_neither_used_nor_changed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 8
    tokenizer.backend_tokenizer.enable_truncation(8, stride=2)
    tokenizer.backend_tokenizer.enable_padding(length=200, pad_id=0, pad_token="<pad>")
    before = tokenizer.backend_tokenizer.to_str()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        tokens = tokenize(text_rows(PROSE * 20), tokenizer, samples=2, sequence_length=64)
        tokenize(text_rows(PROSE * 20), tokenizer, samples=1, sequence_length=64, packing="rows")
        with pytest.raises(InputRefused):
            tokenize(text_rows("dog"), tokenizer, samples=1, sequence_length=64)
    assert tokens.input_ids.shape == (2, 64)
    assert tokenizer.backend_tokenizer.to_str() == before
    assert not caplog.records
