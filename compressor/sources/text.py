"""Rows into token sequences: what calibration and evaluation feed to a model, and a report of it.

Two ways of packing. ``concat`` joins the texts and cuts windows of equal length, the usual way to measure
perplexity; ``rows`` makes one right-padded sequence of each row. A sequence starts with exactly one BOS
where the tokenizer uses one and with none where it does not. The tokenizer itself is left as it was.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.errors import InputRefused, UsageError
from compressor.sources.rows import Message, Rows, read_rows

__all__ = ["DataReport", "Message", "Rows", "TokenSet", "read_rows", "tokenize"]

Packing = Literal["concat", "rows"]
Pick = Literal["first", "spread"]
BosPolicy = Literal["auto", "always", "never"]
BosState = Literal["added", "none", "already present"]

_JOIN = "\n\n"
# Prose has about 4 characters to a token; text much longer than what is needed is not tokenized whole.
_CHARACTERS_PER_TOKEN = 8
_BATCH = 256


@dataclass(frozen=True)
class DataReport:
    """Everything a report says about the data it used.

    ``tokens`` are real ones (special tokens counted, padding not). ``rows_used`` had at least one token
    in a sequence; ``rows_truncated`` were cut to ``sequence_length`` (``rows`` packing only).
    """

    source: str
    rows_read: int
    rows_used: int
    rows_dropped: int
    rows_truncated: int
    sequences: int
    tokens: int
    requested: int
    sequence_length: int
    packing: Packing
    bos: BosState
    sha256: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class TokenSet:
    """``input_ids`` int64 [n, L] and ``attention_mask`` bool [n, L] (true on real tokens), on the CPU.

    L is the longest sequence, at most the ``sequence_length`` asked for. Padding is on the right.
    """

    input_ids: Tensor
    attention_mask: Tensor
    report: DataReport


@dataclass(frozen=True)
class _Frame:
    """What surrounds the tokens of a sequence; ``start`` is the BOS (or CLS) id when ``prefix`` opens with it."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    start: int | None


@dataclass(frozen=True)
class _Sequences:
    """Token ids of every sequence with its frame, and the counts that go into the report."""

    ids: list[list[int]]
    rows_used: int
    tokens_seen: int
    truncated: int = 0
    dropped: int = 0
    had_bos: bool = False
    warnings: tuple[str, ...] = ()


def tokenize(
    rows: Rows,
    tokenizer: Any,
    *,
    samples: int,
    sequence_length: int,
    packing: Packing | Literal["auto"] = "auto",
    pick: Pick = "first",
    seed: int = 0,
    bos: BosPolicy = "auto",
) -> TokenSet:
    """At most ``samples`` sequences of at most ``sequence_length`` tokens from ``rows``.

    ``packing``: ``auto`` is ``rows`` for conversations and ``concat`` for everything else. In ``concat``
    every window is full; what is left over is not used. ``pick``: ``first`` takes the sequences in the
    order of the data (evaluation), ``spread`` takes them from all over it, chosen by ``seed``
    (calibration). ``bos``: ``auto`` does what the tokenizer does to plain text.

    Fewer sequences than ``samples`` is a warning in the report. Raises InputRefused when there is no
    sequence at all or conversations meet a tokenizer without chat template, UsageError for lengths that
    leave no room.
    """
    if samples < 1:
        raise UsageError(f"{samples} sequences asked of {rows.source}: ask for at least 1")
    chosen: Packing = packing if packing != "auto" else "concat" if rows.chats is None else "rows"
    with _limits_lifted(tokenizer):
        frame = _frame(tokenizer, bos)
        if rows.chats is not None:
            # The template closes a conversation itself, so only the BOS may be missing.
            frame = replace(frame, prefix=() if frame.start is None else (frame.start,), suffix=())
        body = sequence_length - len(frame.prefix) - len(frame.suffix)
        if body < 1:
            raise UsageError(
                f"a sequence length of {sequence_length} leaves no room beside the special tokens"
            )
        if chosen == "rows":
            made = _pack_rows(rows, tokenizer, frame, samples, body, pick, seed)
        elif rows.chats is not None:
            made = _concat_chats(rows, tokenizer, frame, samples, body, pick, seed)
        else:
            made = _concat_texts(rows, tokenizer, frame, samples, body, pick, seed)
    if not made.ids:
        raise InputRefused(
            f"{rows.source}: its {made.tokens_seen} tokens do not fill one sequence of {sequence_length}: "
            "give more text or a shorter sequence length"
        )
    warnings = (*rows.warnings, *made.warnings)
    if len(made.ids) < samples:
        warnings += (f"{rows.source}: {len(made.ids)} sequences where {samples} were asked for",)
    input_ids, attention_mask = _padded(made.ids, _pad_id(tokenizer))
    report = DataReport(
        source=rows.source,
        rows_read=rows.read,
        rows_used=made.rows_used,
        rows_dropped=rows.dropped + made.dropped,
        rows_truncated=made.truncated,
        sequences=len(made.ids),
        tokens=int(attention_mask.sum()),
        requested=samples,
        sequence_length=sequence_length,
        packing=chosen,
        bos="already present" if made.had_bos else "none" if frame.start is None else "added",
        sha256=rows.sha256,
        warnings=warnings,
    )
    return TokenSet(input_ids, attention_mask, report)


# ---- one sequence per row


def _pack_rows(
    rows: Rows, tokenizer: Any, frame: _Frame, samples: int, body: int, pick: Pick, seed: int
) -> _Sequences:
    bos_id = tokenizer.bos_token_id
    taken: dict[int, list[int]] = {}
    truncated = seen = empty = 0
    had_bos = False
    encoded = _EncodedRows(rows, tokenizer)
    for index, ids in encoded.in_order(_order(rows, pick, seed), lambda: samples - len(taken)):
        first = next((at for at, token in enumerate(ids) if token != bos_id), len(ids))
        ids, present = ids[first:], first > 0
        if not ids:
            empty += 1
            continue
        seen += len(ids)
        prefix = frame.prefix
        room = body
        if present and bos_id not in prefix:
            prefix, room = (bos_id, *prefix), body - 1
        truncated += len(ids) > room
        had_bos |= present
        taken[index] = [*prefix, *ids[:room], *frame.suffix]
    return _Sequences(
        ids=[taken[index] for index in sorted(taken)],
        rows_used=len(taken),
        tokens_seen=seen,
        truncated=truncated,
        dropped=empty + encoded.refused,
        had_bos=had_bos,
        warnings=encoded.warnings,
    )


def _order(rows: Rows, pick: Pick, seed: int) -> list[int]:
    count = len(rows.texts if rows.chats is None else rows.chats)  # type: ignore[arg-type]
    return list(range(count)) if pick == "first" else np.random.default_rng(seed).permutation(count).tolist()


class _EncodedRows:
    """Tokenizes rows in batches, only as many as are wanted; counts those the chat template refuses."""

    def __init__(self, rows: Rows, tokenizer: Any) -> None:
        self._rows, self._tokenizer = rows, tokenizer
        self._reason = ""
        self.refused = 0
        if rows.chats is not None and not getattr(tokenizer, "chat_template", None):
            raise InputRefused(
                f"{rows.source}: holds conversations and the tokenizer has no chat template: "
                "use a chat model's, or name a text column with --column"
            )

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self.refused:
            return ()
        return (f"{self._rows.source}: the chat template refused {self.refused} rows ({self._reason})",)

    def in_order(self, order: list[int], wanted: Callable[[], int]) -> Iterator[tuple[int, list[int]]]:
        """(row index, token ids without added special tokens) until ``wanted()`` is no longer positive."""
        at = 0
        while at < len(order) and wanted() > 0:
            batch = order[at : at + min(_BATCH, wanted())]
            at += len(batch)
            texts = [(index, self._text(index)) for index in batch]
            kept = [(index, text) for index, text in texts if text is not None]
            if kept:
                ids = _ids(self._tokenizer, [text for _, text in kept])
                yield from zip((index for index, _ in kept), ids, strict=True)
        if self.refused and self.refused == at:
            raise InputRefused(
                f"{self._rows.source}: the tokenizer's chat template takes none of its conversations ({self._reason})"
            )

    def _text(self, index: int) -> str | None:
        if self._rows.texts is not None:
            return self._rows.texts[index]
        assert self._rows.chats is not None
        try:
            return self._tokenizer.apply_chat_template(self._rows.chats[index], tokenize=False)
        except Exception as error:  # templates raise what they like: roles out of order, missing keys
            self.refused += 1
            self._reason = self._reason or " ".join(str(error).split())[:120] or type(error).__name__
            return None


# ---- windows of joined rows


def _concat_chats(
    rows: Rows, tokenizer: Any, frame: _Frame, samples: int, body: int, pick: Pick, seed: int
) -> _Sequences:
    """Conversations end to end; ``spread`` shuffles whole conversations, so that each stays in one piece."""
    stream: list[int] = []
    ends: list[int] = []  # of every conversation, in the stream
    had_bos = False
    encoded = _EncodedRows(rows, tokenizer)

    def wanted() -> int:
        missing = samples * body - len(stream)
        mean = len(stream) / len(ends) if ends else body
        return 0 if missing <= 0 else max(1, int(missing / max(mean, 1)))

    for _, ids in encoded.in_order(_order(rows, pick, seed), wanted):
        kept = [token for token in ids if token != frame.start]
        had_bos |= len(kept) < len(ids)
        stream += kept
        ends.append(len(stream))
    windows = min(samples, len(stream) // body)
    used = sum(start < windows * body for start in [0, *ends[:-1]]) if ends else 0
    return _Sequences(
        ids=[[*frame.prefix, *stream[at * body : (at + 1) * body]] for at in range(windows)],
        rows_used=used,
        tokens_seen=len(stream),
        dropped=encoded.refused,
        had_bos=had_bos,
        warnings=encoded.warnings,
    )


def _concat_texts(
    rows: Rows, tokenizer: Any, frame: _Frame, samples: int, body: int, pick: Pick, seed: int
) -> _Sequences:
    assert rows.texts is not None
    text = _JOIN.join(rows.texts)
    starts = np.array([0, *accumulate(len(row) + len(_JOIN) for row in rows.texts[:-1])])
    had_bos = False
    used: set[int] = set()
    windows: list[list[int]] = []
    seen = 0
    generator = np.random.default_rng(seed)

    def encode(start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of ``text[start:stop]`` and the row that each begins in, less BOS written in the text."""
        nonlocal had_bos
        ids, at = _ids_and_places(tokenizer, text[start:stop], starts - start)
        row = np.searchsorted(starts, at + start, side="right") - 1
        keep = ids != (-1 if frame.start is None else frame.start)
        had_bos |= not keep.all()
        return ids[keep], row[keep]

    def take(ids: NDArray[np.int64], row: NDArray[np.int64], at: int) -> None:
        windows.append([*frame.prefix, *ids[at : at + body].tolist(), *frame.suffix])
        used.update(np.unique(row[at : at + body]).tolist())

    excerpt = body * _CHARACTERS_PER_TOKEN
    if pick == "first":
        stop = min(len(text), samples * excerpt)
        ids, row = encode(0, stop)
        # The last few tokens before a cut may differ from those of the whole text: keep clear of them.
        while stop < len(text) and len(ids) < samples * body + 64:
            stop = min(len(text), 2 * stop)
            ids, row = encode(0, stop)
        seen = len(ids)
        for index in range(min(samples, len(ids) // body)):
            take(ids, row, index * body)
    elif len(text) <= 2 * samples * excerpt:
        ids, row = encode(0, len(text))
        seen = len(ids)
        for index in _one_of_each(len(ids) // body, samples, generator):
            take(ids, row, index * body)
    else:
        edges = np.linspace(0, len(text), samples + 1).astype(int)
        for low, high in pairwise(edges):
            start = _word_start(text, int(generator.integers(low, high - excerpt + 1)), int(high))
            ids, row = encode(start, min(start + excerpt, int(high)))
            if len(ids) <= body:  # many characters to a token here: look at the whole part
                ids, row = encode(int(low), int(high))
            seen += len(ids)
            if len(ids) >= body:
                take(ids, row, 0)
    return _Sequences(windows, rows_used=len(used), tokens_seen=seen, had_bos=had_bos)


def _one_of_each(total: int, samples: int, generator: np.random.Generator) -> list[int]:
    """``samples`` increasing indices below ``total``, one from each of ``samples`` equal parts."""
    if total <= samples:
        return list(range(total))
    edges = [total * part // samples for part in range(samples + 1)]
    return [int(generator.integers(low, high)) for low, high in pairwise(edges)]


def _word_start(text: str, start: int, stop: int) -> int:
    """The first place in ``text[start:stop]`` after a line break, or else a space, or else ``start``."""
    for mark in ("\n", " "):
        at = text.find(mark, start, min(stop, start + 1000))
        if at >= 0:
            return at + 1
    return start


# ---- the tokenizer


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    # verbose=False: a text longer than the model's limit is expected here, it is cut afterwards
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _ids_and_places(
    tokenizer: Any, text: str, row_starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids of ``text`` and the character at which each token begins."""
    if tokenizer.is_fast:
        encoding = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.array(encoding["input_ids"], dtype=np.int64), offsets[:, 0]
    # A tokenizer in Python knows no places, so rows go through it one by one: exact to the row.
    cuts = [0, *(int(start) for start in row_starts if 0 < start < len(text)), len(text)]
    parts = [_ids(tokenizer, [text[a:b]])[0] for a, b in pairwise(cuts)]
    places = np.repeat(np.array(cuts[:-1]), [len(part) for part in parts])
    return np.array([token for part in parts for token in part], dtype=np.int64), places


def _frame(tokenizer: Any, policy: BosPolicy) -> _Frame:
    """What the tokenizer puts around plain text, seen by letting it do so, with ``policy`` applied."""
    plain = _ids(tokenizer, ["a"])[0]
    dressed = tokenizer(["a"], add_special_tokens=True, verbose=False)["input_ids"][0]
    at = next((i for i in range(len(dressed)) if plain and dressed[i : i + len(plain)] == plain), None)
    prefix = tuple(dressed[:at]) if at is not None else ()
    suffix = tuple(dressed[at + len(plain) :]) if at is not None else ()
    bos_id = tokenizer.bos_token_id
    if suffix != (tokenizer.sep_token_id,):  # an EOS after a window cut out of running text would be a lie
        suffix = ()
    if policy == "never":
        prefix = tuple(token for token in prefix if token != bos_id)
    elif policy == "always" and bos_id not in prefix:
        if bos_id is None:
            raise InputRefused("the tokenizer has no BOS token to put in front of every sequence")
        prefix = (bos_id, *prefix)
    start = prefix[0] if prefix and prefix[0] in (bos_id, tokenizer.cls_token_id) else None
    return _Frame(prefix, suffix, start)


def _pad_id(tokenizer: Any) -> int:
    """Any id does, since padding is masked out; 0 for a tokenizer with neither pad nor EOS token."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _padded(sequences: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, sequences))
    input_ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    attention_mask = torch.zeros((len(sequences), longest), dtype=torch.bool)
    for index, ids in enumerate(sequences):
        input_ids[index, : len(ids)] = torch.tensor(ids)
        attention_mask[index, : len(ids)] = True
    return input_ids, attention_mask


@contextmanager
def _limits_lifted(tokenizer: Any) -> Iterator[None]:
    """Put back the truncation and padding stored in ``tokenizer.json``, which calling a tokenizer removes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
