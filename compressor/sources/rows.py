"""Read a data set into rows, before any tokenizer or model is involved.

A data set is named by one string: ``builtin:test``, a file, a directory written by ``save_to_disk`` or a
hub id. What comes out is plain text rows or conversations, counted and hashed; a data set that cannot be
used is refused here, before anything expensive starts.
"""

import csv
import hashlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from compressor.errors import InputRefused, UsageError
from compressor.sources.builtin_text import Split, builtin_text

Message = dict[str, Any]

# A column of the first line wins over one of the second (chat sets repeat their first turn as "prompt").
_CHAT_COLUMNS = ("messages", "conversations", "conversation")
_COLUMNS = (
    ("text", *_CHAT_COLUMNS),
    ("content", "document", "article", "passage", "sentence", "body", "prompt"),
)
# ShareGPT's names of the speakers.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
# A hub data set that is larger to download is streamed, and only this many of its rows are read.
_STREAM_BYTES, _STREAM_ROWS = 2 << 30, 20_000


@dataclass(frozen=True)
class Rows:
    """The usable rows of a data set: either ``texts`` or ``chats`` is given, never both.

    ``read`` counts every row met, ``dropped`` those that were empty, blank or of the wrong type.
    ``sha256`` is over the usable rows. ``document``: the texts are continuous prose, not separate items.
    """

    source: str
    texts: tuple[str, ...] | None
    chats: tuple[list[Message], ...] | None
    read: int
    dropped: int
    sha256: str
    document: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Table:
    """Named columns, each read on demand; or one nameless list of ``values``."""

    columns: tuple[str, ...] = ()
    get: Callable[[str], Sequence[Any]] | None = None
    values: Sequence[Any] | None = None
    warnings: tuple[str, ...] = ()


def read_rows(
    ref: str, *, column: str | None = None, split: str | None = None, revision: str | None = None
) -> Rows:
    """Read the data set ``ref``.

    ``ref``: ``builtin:calibration`` (or ``builtin``), ``builtin:test``, ``builtin:train``; a ``.txt``,
    ``.md``, ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file; a directory written by
    ``Dataset.save_to_disk``; else a hub id, ``id:config`` to name a configuration. ``column`` is found by
    its name when there is one obvious candidate. ``split`` is needed when there are several.

    Raises UsageError for a column or split that is missing or ambiguous (the message lists those there
    are) and InputRefused when the data cannot be read or no row is usable.
    """
    if ref == "builtin" or ref.startswith("builtin:"):
        _reject(ref, "built-in text", column=column, split=split, revision=revision)
        name = ref.partition(":")[2] or "calibration"
        if name not in get_args(Split):
            raise UsageError(f"{ref}: the built-in text has the splits {', '.join(get_args(Split))}")
        documents = builtin_text(cast(Split, name))
        return _text_rows(ref, [document.text for document in documents], document=True)

    path = Path(ref).expanduser()
    if path.is_file():
        _reject(ref, "a file", split=split, revision=revision)
        suffix = path.suffix.lower()
        if suffix in (".txt", ".md"):
            _reject(ref, "plain text", column=column)
            return _text_rows(ref, [_decode(path)], document=True)
        table = _file_table(path, suffix)
    elif path.is_dir():
        _reject(ref, "a local directory", revision=revision)
        table = _saved_table(path, split)
    elif ref.startswith((".", "/", "~")) or ref.lower().endswith(_SUFFIXES) or ref.count("/") > 1:
        raise InputRefused(f"{ref}: no such file or directory")
    else:
        table = _hub_table(ref, split, revision)
    return _rows_of(ref, table, column)


def read_table(
    ref: str, *, split: str | None = None, header: Sequence[str] | None = None
) -> dict[str, Sequence[Any]]:
    """All columns of a data set that :func:`read_rows` understands, for tasks that need more than text.

    ``header`` names the columns of a ``.csv`` or ``.tsv`` file that has no header line. Raises as
    :func:`read_rows` does, and InputRefused for data without named columns.
    """
    path = Path(ref).expanduser()
    if header is not None and path.suffix.lower() not in (".csv", ".tsv"):
        raise UsageError(f"{ref}: only .csv and .tsv files lack a header, so naming columns does not apply")
    if path.is_file():
        _reject(ref, "a file", split=split)
        suffix = path.suffix.lower()
        if header is not None:
            table = _csv_table(path, "\t" if suffix == ".tsv" else ",", list(header))
        else:
            table = _file_table(path, suffix)
    elif path.is_dir():
        table = _saved_table(path, split)
    elif ref.startswith((".", "/", "~")) or ref.lower().endswith(_SUFFIXES) or ref.count("/") > 1:
        raise InputRefused(f"{ref}: no such file or directory")
    else:
        table = _hub_table(ref, split, None)
    if table.get is None:
        raise InputRefused(f"{ref}: has no named columns, which this task needs")
    return {name: table.get(name) for name in table.columns}


def _reject(ref: str, kind: str, **options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"--{name} {value} does not apply: {ref} is {kind}")


# ---- from a table to rows


def _rows_of(ref: str, table: _Table, column: str | None) -> Rows:
    if table.values is not None:
        if column is not None:
            raise UsageError(f"{ref}: has no named columns, so --column {column} does not apply")
        values, chats = table.values, any(isinstance(value, list) for value in table.values)
    else:
        assert table.get is not None
        name = column if column is not None else _obvious_column(ref, table)
        if name not in table.columns:
            raise UsageError(f"{ref}: has no column {name}; its columns are {_listed(table.columns)}")
        values = table.get(name)
        chats = name in _CHAT_COLUMNS or any(isinstance(value, list | dict) for value in values)
    if chats:
        return _chat_rows(ref, values, table.warnings)
    return _text_rows(ref, values, document=False, warnings=table.warnings)


def _obvious_column(ref: str, table: _Table) -> str:
    for candidates in _COLUMNS:
        found = [name for name in candidates if name in table.columns]
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{ref}: choose a column with --column: {_listed(found)} could all be meant")
    if len(table.columns) == 1:
        return table.columns[0]
    raise UsageError(f"{ref}: name the text column with --column; its columns are {_listed(table.columns)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(str, names[:20])) or "(none)"
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _text_rows(ref: str, values: Sequence[Any], *, document: bool, warnings: tuple[str, ...] = ()) -> Rows:
    texts = [value for value in values if _is_text(value)]
    if not texts:
        raise InputRefused(f"{ref}: none of its {len(values)} rows holds any text")
    dropped = len(values) - len(texts)
    return Rows(ref, tuple(texts), None, len(values), dropped, _sha256(texts), document, warnings)


def _chat_rows(ref: str, values: Sequence[Any], warnings: tuple[str, ...]) -> Rows:
    chats = [chat for chat in map(_conversation, values) if chat is not None]
    if not chats:
        raise InputRefused(
            f"{ref}: none of its {len(values)} rows is a conversation, a list of messages with role and content"
        )
    dropped = len(values) - len(chats)
    digest = _sha256([json.dumps(chat, sort_keys=True, ensure_ascii=False, default=str) for chat in chats])
    return Rows(ref, None, tuple(chats), len(values), dropped, digest, False, warnings)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and _encodable(value)


def _encodable(text: str) -> bool:
    """False for half of a surrogate pair, left by a cut JSON escape: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _conversation(value: Any) -> list[Message] | None:
    """The messages of one row as role and content; None when it is not a conversation."""
    if isinstance(value, dict):  # how some versions of datasets give a list of structs
        keys = [key for key, column in value.items() if isinstance(column, list)]
        value = [
            dict(zip(keys, row, strict=True)) for row in zip(*(value[key] for key in keys), strict=False)
        ]
    if not isinstance(value, list):
        return None
    messages = [_message(item) for item in value]
    if any(message is None for message in messages):
        return None
    chat = [message for message in messages if message is not None]
    return chat if any(_is_text(message["content"]) for message in chat) else None


def _message(item: Any) -> Message | None:
    if not isinstance(item, dict):
        return None
    if "from" in item and "role" not in item:
        role = _ROLES.get(item["from"]) if isinstance(item["from"], str) else None
        item = {"role": role, "content": item.get("value")}
    role, content = item.get("role"), item.get("content")
    if isinstance(content, list):  # parts of a multimodal message; other kinds than text are not for us
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is None and item.get("tool_calls"):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str) or not _encodable(content):
        return None
    rest = {key: value for key, value in item.items() if key not in ("role", "content") and value is not None}
    return {"role": role, "content": content, **rest}


def _sha256(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))  # so that ["ab"] and ["a", "b"] differ
        digest.update(data)
    return digest.hexdigest()


# ---- from a reference to a table


def _decode(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputRefused(f"{path}: cannot be read ({error.strerror})") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputRefused(f"{path}: line {line} is not UTF-8: save the file as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputRefused(f"{path}: line {line} holds a NUL character, so it is not a text file")
    return text.replace("\r\n", "\n")


def _file_table(path: Path, suffix: str) -> _Table:
    match suffix:
        case ".jsonl":
            return _table_of_records(path, _json_lines(path, _decode(path)))
        case ".json":
            return _json_table(path)
        case ".csv":
            return _csv_table(path, ",")
        case ".tsv":
            return _csv_table(path, "\t")
        case ".parquet":
            return _parquet_table(path)
    raise InputRefused(f"{path}: text data is one of {', '.join(_SUFFIXES)}, or a save_to_disk directory")


def _json_lines(path: Path, text: str) -> list[tuple[int, Any]]:
    """(line number, value) of every line that is not blank."""
    records = []
    # Not splitlines(): U+2028 and its kind may stand unescaped inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            records.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too large"
            raise InputRefused(
                f"{path}: line {number} is not JSON ({reason}): fix or remove that line"
            ) from None
    return records


def _json_table(path: Path) -> _Table:
    text = _decode(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON Lines under the shorter name
            return _table_of_records(path, _json_lines(path, text))
        raise InputRefused(f"{path}: line {error.lineno} is not JSON ({error.msg}): fix the file") from None
    except (ValueError, RecursionError):
        raise InputRefused(f"{path}: is not JSON that can be read (too deep or too large)") from None
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if isinstance(value, dict) and value and all(isinstance(cells, list) for cells in value.values()):
        lengths = {len(cells) for cells in value.values()}
        if len(lengths) > 1:
            raise InputRefused(
                f"{path}: its columns have different lengths ({min(lengths)} to {max(lengths)})"
            )
        return _Table(tuple(value), value.__getitem__)
    if isinstance(value, list):
        return _table_of_records(path, list(enumerate(value, 1)), unit="row")
    if isinstance(value, dict):
        return _table_of_records(path, [(1, value)])
    raise InputRefused(f'{path}: expected a list of rows, an object of columns or {{"data": [...]}}')


def _table_of_records(path: Path, records: list[tuple[int, Any]], *, unit: str = "line") -> _Table:
    names = {dict: "an object", str: "a string", list: "a list of messages"}
    first = next((record for _, record in records if record is not None), None)
    if first is None:
        raise InputRefused(f"{path}: holds no rows")
    kind = next((kind for kind in names if isinstance(first, kind)), dict)
    for number, record in records:
        if record is not None and not isinstance(record, kind):
            raise InputRefused(f"{path}: {unit} {number} is not {names[kind]}: all rows must be of one kind")
    if kind is not dict:
        return _Table(values=[record for _, record in records])
    columns = dict.fromkeys(key for _, record in records if record for key in record)
    return _Table(tuple(columns), lambda name: [(record or {}).get(name) for _, record in records])


def _csv_table(path: Path, delimiter: str, header: list[str] | None = None) -> _Table:
    text = _decode(path)
    limit = csv.field_size_limit(sys.maxsize)  # a document in one cell is longer than the default 128 KiB
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows: list[list[str]] = []
        for cells in reader:
            if not any(cell.strip() for cell in cells) and len(cells) <= 1:
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                continue
            if len(cells) != len(header):
                raise InputRefused(
                    f"{path}: line {reader.line_num} has {len(cells)} cells where the header has {len(header)}"
                )
            rows.append(cells)
    except csv.Error as error:
        raise InputRefused(f"{path}: line {reader.line_num} cannot be read as CSV ({error})") from None
    finally:
        csv.field_size_limit(limit)
    if header is None or not rows:
        raise InputRefused(f"{path}: holds no rows under a header line")
    if len(set(header)) != len(header):
        raise InputRefused(f"{path}: its header names a column twice ({_listed(header)})")
    return _Table(tuple(header), lambda name: [cells[header.index(name)] for cells in rows])


def _parquet_table(path: Path) -> _Table:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = tuple(file.schema_arrow.names)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputRefused(f"{path}: cannot be read as Parquet ({_one_line(error)})") from None

    def get(name: str) -> list[Any]:
        try:
            return file.read(columns=[name]).column(name).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise InputRefused(f"{path}: column {name} cannot be read ({_one_line(error)})") from None

    return _Table(columns, get)


def _saved_table(path: Path, split: str | None) -> _Table:
    from datasets import DatasetDict, load_from_disk

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise InputRefused(f"{path}: not a directory written by Dataset.save_to_disk: name a file in it")
    try:
        data: Any = load_from_disk(str(path))
    except Exception as error:  # many kinds, all meaning that the directory is damaged
        raise InputRefused(f"{path}: cannot be read as a saved data set ({_one_line(error)})") from None
    if isinstance(data, DatasetDict):
        data = data[_chosen_split(str(path), split, list(data))]
    elif split is not None and split != str(data.split):
        raise UsageError(f"{path}: holds one data set and no splits, so --split {split} does not apply")
    return _Table(tuple(data.column_names), lambda name: data[name][:])


def _hub_table(ref: str, split: str | None, revision: str | None) -> _Table:
    import datasets

    name, _, config = ref.partition(":")
    try:
        if split is None:
            splits = datasets.get_dataset_split_names(name, config or None, revision=revision)
        else:
            splits = [split]
        split = _chosen_split(ref, split, splits)
        builder = datasets.load_dataset_builder(name, config or None, revision=revision)
        if (builder.info.download_size or 0) > _STREAM_BYTES:
            stream = datasets.load_dataset(
                name, config or None, split=split, revision=revision, streaming=True
            )
            records = list(stream.take(_STREAM_ROWS))
            warning = f"{ref}: large, so only its first {len(records)} rows were read"
            columns = tuple(dict.fromkeys(key for record in records for key in record))
            return _Table(columns, lambda name: [record.get(name) for record in records], warnings=(warning,))
        data: Any = datasets.load_dataset(name, config or None, split=split, revision=revision)
    except UsageError:
        raise
    except Exception as error:  # the hub, the network and datasets raise many kinds here
        raise InputRefused(
            f"{ref}: neither a local path nor a data set the hub gives us ({_one_line(error)})"
        ) from None
    return _Table(tuple(data.column_names), lambda name: data[name][:])


def _chosen_split(ref: str, split: str | None, splits: list[str]) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None:
        raise UsageError(f"{ref}: choose a split with --split: {_listed(splits)}")
    if split not in splits:
        raise UsageError(f"{ref}: has no split {split}; its splits are {_listed(splits)}")
    return split


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
