"""Safetensors files as byte ranges: a strict header reader, an index over shards, one-tensor reads.

Input files are hostile until proven otherwise: every length, offset and path is checked against the
format's specification (https://github.com/huggingface/safetensors#format) before a byte is used, and
the error names the file and the tensor.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compressor.errors import InputRefused

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # the specification's own limit, in bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``begin`` and ``end`` are absolute byte offsets in ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def read_header(file: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of one safetensors file and its metadata.

    Raises InputRefused when the file is missing, truncated or breaks the specification.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_HEADER_LIMIT, size - 8):
                raise InputRefused(
                    f"{file}: not a safetensors file, or truncated inside its header: fetch it again"
                )
            header = json.loads(stream.read(length).decode("utf-8"))
    except OSError as error:
        raise InputRefused(f"{file}: cannot be read ({error.strerror}): fetch the checkpoint again") from None
    except (ValueError, RecursionError):
        raise InputRefused(f"{file}: its safetensors header is not valid JSON: fetch it again") from None
    if not isinstance(header, dict):
        raise InputRefused(f"{file}: its safetensors header is not a JSON object: fetch it again")

    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputRefused(f"{file}: its safetensors metadata is not text: fetch it again")
    start = 8 + length
    entries = {}
    for name, info in header.items():
        try:
            begin, end = info["data_offsets"]
            entry = TensorEntry(name, info["dtype"], tuple(info["shape"]), file, start + begin, start + end)
            item = DTYPES[entry.dtype].itemsize
            valid = (
                all(type(number) is int and number >= 0 for number in (begin, end, *entry.shape))
                and begin <= end
                and entry.nbytes == entry.numel * item
            )
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise InputRefused(f"{file}: tensor {name!r} has an invalid header entry: fetch the file again")
        if entry.end > size:
            raise InputRefused(
                f"{file}: truncated: tensor {name!r} ends {entry.end - size} bytes past the file: fetch it again"
            )
        entries[name] = entry
    ordered = sorted(entries.values(), key=lambda entry: (entry.begin, entry.end))
    position = start
    for entry in ordered:
        if entry.begin != position:
            raise InputRefused(
                f"{file}: tensor {entry.name!r} overlaps another or leaves a hole: fetch the file again"
            )
        position = entry.end
    if position != size:
        raise InputRefused(
            f"{file}: holds {size - position} bytes after the last tensor: fetch the file again"
        )
    return entries, metadata


def index_directory(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint directory, from ``model.safetensors`` or its shard index.

    Raises InputRefused for a missing or corrupt file, an index that points outside the directory or
    at a shard or tensor that is not there, and a shard tensor that the index does not list.
    """
    index_file = directory / INDEX
    if not index_file.exists():
        single = directory / SINGLE
        if not single.exists():
            raise InputRefused(f"{directory}: no {SINGLE} or {INDEX} in it")
        return read_header(single)[0]

    try:
        weight_map = json.loads(index_file.read_text("utf-8"))["weight_map"]
        shards = {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise InputRefused(f"{index_file}: not a valid shard index (no JSON object weight_map)") from None
    found: dict[str, TensorEntry] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise InputRefused(
                f"{index_file}: shard {shard!r} lies outside the checkpoint directory: refused as unsafe"
            )
        if not (directory / shard).is_file():
            raise InputRefused(
                f"{index_file}: shard {shard!r} is missing from {directory}: fetch the checkpoint again"
            )
        entries, _ = read_header(directory / shard)
        for name, entry in entries.items():
            if shards.get(name) != shard:
                raise InputRefused(
                    f"{directory / shard}: holds tensor {name!r}, which {INDEX} places elsewhere or nowhere"
                )
            found[name] = entry
    for name, shard in shards.items():
        if name not in found:
            raise InputRefused(f"{directory / shard}: tensor {name!r} is listed in {INDEX} but not stored")
    return found


def read_tensor(entry: TensorEntry) -> Tensor:
    """One tensor, read into memory of its own, in its stored dtype on the CPU."""
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    buffer = bytearray(entry.nbytes)
    with entry.file.open("rb") as stream:
        stream.seek(entry.begin)
        if stream.readinto(buffer) != entry.nbytes:
            raise InputRefused(f"{entry.file}: truncated inside tensor {entry.name!r}: fetch it again")
    return torch.frombuffer(buffer, dtype=entry.torch_dtype).reshape(entry.shape)


def check_finite(entries: Iterable[TensorEntry]) -> None:
    """Raise InputRefused naming the first tensor that holds an inf or a NaN."""
    for entry in entries:
        dtype = entry.torch_dtype
        if not dtype.is_floating_point:
            continue
        values = read_tensor(entry)
        if dtype.itemsize == 1:
            values = values.float()
        # One reduction: the sum of 0·x is NaN exactly when some x is inf or NaN.
        if not torch.isfinite((values.flatten() * 0).sum()):
            bad = int((~torch.isfinite(values)).sum())
            raise InputRefused(
                f"{entry.file}: tensor {entry.name!r} holds {bad} inf or NaN values: the source is broken"
            )


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
