"""Working files of a scan or a diagnosis, so that a killed one goes on where it stopped.

``.NAME.partial/`` beside the output holds hidden states and gradients as memory-mapped files (they may be larger
than memory) and ``journal.json``, the records of the steps that are finished. Gradients alternate between two files: a block reads
one and writes the other, so the one that is read stays whole until the block is journalled.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.errors import MachineLimit


class Journal:
    """Context manager. ``finished`` maps names of steps to their records, for the given ``fingerprint`` only."""

    def __init__(self, output: Path, fingerprint: dict[str, Any]) -> None:
        self.directory = _partial(output)
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self.finished: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "Journal":
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = (self.directory / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MachineLimit(f"{self.directory}: another command is working on the same output") from None
        try:
            data = json.loads((self.directory / "journal.json").read_text("utf-8"))
        except (OSError, ValueError):
            data = {}
        if data.get("fingerprint") == self._fingerprint:
            self.finished = data["finished"]
        else:
            for file in self.directory.iterdir():
                if file.name != "lock":
                    file.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()
        if not self.finished:
            shutil.rmtree(self.directory, ignore_errors=True)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A file-backed tensor that keeps its values between runs."""
        size = 1
        for side in shape:
            size *= side
        file = self.directory / f"{name}.bin"
        missing = size * dtype.itemsize - (file.stat().st_size if file.exists() else 0)
        free = shutil.disk_usage(self.directory).free
        if missing > free:
            raise MachineLimit(
                f"{file}: {missing:,} bytes are needed and {free:,} are free: use fewer samples or another output"
            )
        return torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(shape)

    def finish(self, step: str, record: dict[str, Any] | None = None) -> None:
        """Note that ``step`` is done; ``record`` is plain data."""
        self.finished[step] = record or {}
        data = {"fingerprint": self._fingerprint, "finished": self.finished}
        new = self.directory / "journal.json.new"
        with new.open("w", encoding="utf-8") as stream:
            json.dump(data, stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(self.directory / "journal.json")

    def remove(self) -> None:
        """Forget everything when the work is complete; the directory goes when the context is left."""
        self.finished = {}


def begun(output: Path) -> dict[str, dict[str, Any]]:
    """What a run that was to make ``output`` had finished when it was killed; empty when there is none."""
    try:
        found: dict[str, dict[str, Any]] = json.loads((_partial(output) / "journal.json").read_text("utf-8"))[
            "finished"
        ]
    except (OSError, ValueError, KeyError):
        return {}
    return found


def block_step(index: int) -> str:
    return f"block {index}"


def _partial(output: Path) -> Path:
    output = output.absolute()
    return output.with_name(f".{output.name}.partial")


def block_records(journal: Journal, count: int) -> dict[int, dict[str, Any]]:
    """Records of the finished ones among ``count`` blocks, by index."""
    steps = {index: block_step(index) for index in range(count)}
    return {index: journal.finished[step] for index, step in steps.items() if step in journal.finished}
