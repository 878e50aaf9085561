"""Write one safetensors file as a stream: tensors from memory or as byte ranges of other files.

Ranges are copied as bytes, never through a tensor, so a tensor that is carried over is identical to its
source by construction, and memory stays at one copy buffer. Layout as in the reference implementation
(https://github.com/huggingface/safetensors#format): the largest element size first, so that every tensor
is aligned to its own, and a header padded to 8 bytes.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.errors import InputRefused
from compressor.sources.tensors import DTYPE_NAMES, DTYPES, TensorEntry

_CHUNK = 2**24  # bytes


def write_safetensors(file: Path, tensors: Mapping[str, Tensor | TensorEntry]) -> str:
    """Write ``tensors`` to ``file``, flushed to disk, and return the file's SHA-256 in hexadecimal.

    The same tensors give the same bytes, in whatever order they come. Raises InputRefused when a source
    file ends before a tensor does.
    """
    described = {name: _describe(value) for name, value in tensors.items()}
    order = sorted(described, key=lambda name: (-DTYPES[described[name][0]].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        dtype, shape, size = described[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    digest = hashlib.sha256()
    with file.open("wb") as stream:
        for chunk in (len(text).to_bytes(8, "little"), text):
            digest.update(chunk)
            stream.write(chunk)
        for name in order:
            for part in _bytes(tensors[name]):
                digest.update(part)
                stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _describe(value: Tensor | TensorEntry) -> tuple[str, list[int], int]:
    if isinstance(value, TensorEntry):
        return value.dtype, list(value.shape), value.nbytes
    return DTYPE_NAMES[value.dtype], list(value.shape), value.nbytes


def _bytes(value: Tensor | TensorEntry) -> Iterator[memoryview]:
    if isinstance(value, TensorEntry):
        yield from read_range(value)
    elif value.numel():
        yield value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


def read_range(entry: TensorEntry) -> Iterator[memoryview]:
    """The bytes of one stored tensor, in pieces; a piece is valid until the next one is taken."""
    buffer = memoryview(bytearray(min(_CHUNK, entry.nbytes)))
    left = entry.nbytes
    with entry.file.open("rb") as stream:
        stream.seek(entry.begin)
        while left:
            read = stream.readinto(buffer[: min(left, len(buffer))])
            if not read:
                raise InputRefused(f"{entry.file}: truncated inside tensor {entry.name!r}: fetch it again")
            yield buffer[:read]
            left -= read
