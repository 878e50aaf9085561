"""Hostile safetensors: whatever is in a file, it is read correctly or refused in one line that names it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressor.errors import InputRefused
from compressor.sources.tensors import (
    INDEX,
    SINGLE,
    check_finite,
    index_directory,
    read_header,
    read_tensor,
)


def raw(file: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1] if shape is None else shape, "data_offsets": [begin, end]}


def refused(file: Path) -> str:
    with pytest.raises(InputRefused) as caught:
        read_header(file)
    message = str(caught.value)
    assert "\n" not in message
    assert str(file) in message
    return message


def test_what_the_reference_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4).bfloat16(),
        "b.c": torch.arange(7),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "x", {"format": "pt"})
    entries, metadata = read_header(tmp_path / "x")
    assert metadata == {"format": "pt"}
    assert set(entries) == set(tensors)
    for name, value in tensors.items():
        found = read_tensor(entries[name])
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert torch.equal(found.float(), value.float())


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        (b"", b"", 0, "not valid JSON"),
        (b"{}", b"", 10**9, "truncated inside its header"),
        (b"{}", b"", 2**64 - 1, "truncated inside its header"),
        (b'{"a": ', b"", None, "not valid JSON"),
        (b"\xff\xfe{}", b"", None, "not valid JSON"),
        (b"[1, 2]", b"", None, "not a JSON object"),
        (b"[" * 100_000, b"", None, "not valid JSON"),
        ({"a": 5}, b"", None, "'a'"),
        ({"a": {}}, b"", None, "'a'"),
        ({"a": None}, b"", None, "'a'"),
        ({"a": entry(0, 4, dtype="F99")}, b"1234", None, "'a'"),
        ({"a": entry(0, 4, shape=[2])}, b"1234", None, "'a'"),
        ({"a": entry(0, 4, shape=[-1])}, b"1234", None, "'a'"),
        ({"a": entry(0, 4, shape=[-1, -1])}, b"1234", None, "'a'"),
        ({"a": entry(0, 4, shape=["1"])}, b"1234", None, "'a'"),
        ({"a": entry(0, 4, shape=[1.0])}, b"1234", None, "'a'"),
        ({"a": entry(0, 4, shape=[True])}, b"1234", None, "'a'"),
        ({"a": {**entry(0, 4), "shape": 1}}, b"1234", None, "'a'"),
        ({"a": entry(4, 0)}, b"1234", None, "'a'"),
        ({"a": entry(-4, 0)}, b"1234", None, "'a'"),
        ({"a": {**entry(0, 4), "data_offsets": [0]}}, b"1234", None, "'a'"),
        ({"a": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, b"1234", None, "'a'"),
        ({"a": {**entry(0, 4), "data_offsets": [0.0, 4.0]}}, b"1234", None, "'a'"),
        ({"a": {**entry(0, 4), "data_offsets": ["0", "4"]}}, b"1234", None, "'a'"),
        ({"a": entry(0, 4)}, b"123", None, "1 bytes past"),
        ({"a": entry(0, 2**60, shape=[2**58])}, b"1234", None, "past the file"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, b"1234", None, "overlaps"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", None, "overlaps"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, b"1" * 12, None, "hole"),
        ({"a": entry(4, 8)}, b"1" * 8, None, "hole"),
        ({"a": entry(0, 4)}, b"1" * 8, None, "after the last tensor"),
        ({"__metadata__": [1], "a": entry(0, 4)}, b"1234", None, "metadata"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}', b"1234", None, "'a'"),
    ],
)  # fmt: skip
def test_broken_files_are_refused(
    tmp_path: Path, header: bytes | dict[str, Any], data: bytes, length: int | None, words: str
) -> None:
    assert words in refused(raw(tmp_path / "x.safetensors", header, data, length))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40])
def test_truncated_anywhere(tmp_path: Path, size: int) -> None:
    save_file({"a": torch.ones(5), "b": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:size])
    refused(tmp_path / "x")


def test_missing_or_a_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nothing")
    refused(tmp_path)


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5)}, tmp_path / "x")
    entries, _ = read_header(tmp_path / "x")
    os.truncate(tmp_path / "x", (tmp_path / "x").stat().st_size - 3)
    with pytest.raises(InputRefused, match="truncated inside tensor 'a'"):
        read_tensor(entries["a"])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_read_as_the_reference_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "x"
    save_file({"ab": torch.arange(4.0), "c": torch.ones(2, 3).half()}, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(len(content) - 2, len(content)))])
    try:
        entries, _ = read_header(file)
    except InputRefused:
        return
    ours = {name: read_tensor(entry) for name, entry in entries.items()}
    theirs = load_file(file)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert ours[name].shape == value.shape
        assert ours[name].flatten().view(torch.uint8).equal(value.flatten().view(torch.uint8))


# --- directories -------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_and_single_files(sharded: Path) -> None:
    assert sorted(index_directory(sharded)) == ["a", "b"]
    (sharded / INDEX).unlink()
    save_file({"c": torch.ones(1)}, sharded / SINGLE)
    assert sorted(index_directory(sharded)) == ["c"]


@pytest.mark.parametrize(
    "shard", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", "", "a\x00b", "..\\one"]
)
def test_an_index_stays_in_its_directory(sharded: Path, shard: str) -> None:
    (sharded.parent / "one.safetensors").write_bytes((sharded / "one.safetensors").read_bytes())
    write_index(sharded, {"a": shard, "b": "two.safetensors"})
    with pytest.raises(InputRefused, match=r"unsafe|missing|cannot be read") as caught:
        index_directory(sharded)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "one.safetensors", "b": "gone.safetensors"}, "'gone.safetensors' is missing"),
        ({"a": "one.safetensors"} | {"ghost": "one.safetensors"}, "'ghost' is listed"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' is listed"),
        ({"b": "two.safetensors", "c": "one.safetensors"}, "places elsewhere or nowhere"),
        ([], "weight_map"),
        (None, "weight_map"),
        ("x", "weight_map"),
    ],
)
def test_an_index_that_lies(sharded: Path, weight_map: Any, words: str) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(InputRefused) as caught:
        index_directory(sharded)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"weight_map": 3}', "\xff"])
def test_an_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(InputRefused, match="not a valid shard index"):
        index_directory(sharded)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (torch.float32, float("inf")),
        (torch.bfloat16, float("nan")),
        (torch.float16, float("-inf")),
        (torch.float64, float("nan")),
        (torch.float8_e4m3fn, float("nan")),
        (torch.float8_e5m2, float("inf")),
    ],
)
def test_infinite_weights_are_named(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    values = torch.ones(4, 5)
    save_file({"good": values.to(dtype), "ids": torch.arange(3)}, tmp_path / "x")
    check_finite(read_header(tmp_path / "x")[0].values())
    values[2, 3] = bad
    save_file({"good": torch.ones(2), "bad.weight": values.to(dtype)}, tmp_path / "y")
    with pytest.raises(InputRefused, match=r"'bad.weight' holds 1 inf or NaN"):
        check_finite(read_header(tmp_path / "y")[0].values())


def test_the_largest_finite_values_pass(tmp_path: Path) -> None:
    extreme = {
        str(d): torch.full((3,), torch.finfo(d).max, dtype=d)
        for d in (torch.float32, torch.bfloat16, torch.float16)
    }
    save_file(extreme, tmp_path / "x")
    check_finite(read_header(tmp_path / "x")[0].values())
