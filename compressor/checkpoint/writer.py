"""Write a checkpoint atomically and resumably.

Everything is built in ``.NAME.partial/`` beside the target and renamed into place at the end::

    .NAME.partial/lock             held while a run works here
    .NAME.partial/journal.json     what the run was made from, and the blocks that are finished
    .NAME.partial/blocks/          one safetensors file per finished block
    .NAME.partial/checkpoint/      the result, being assembled

A killed run leaves only that directory. The same job started again verifies the finished blocks by their
hashes and goes on after them, ending in the same bytes; another job (another fingerprint) starts over.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch import Tensor

from compressor.checkpoint.carried_files import carried_files, carried_name
from compressor.checkpoint.safetensors_file import write_safetensors
from compressor.checkpoint.sidecar import SIDECAR
from compressor.console import note
from compressor.errors import InputRefused, MachineLimit, UsageError
from compressor.sources.model import Source
from compressor.sources.tensors import INDEX, SINGLE, TensorEntry, file_sha256, read_header, read_tensor

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class BlockRecord:
    """A finished block: its file in ``blocks/``, that file's SHA-256, and what was recorded of its layers."""

    index: int
    file: str
    sha256: str
    records: list[dict[str, Any]]


def refuse_source(target: Path, source: Source) -> None:
    """Raise UsageError when ``target`` is the directory that the model is read from, or holds it."""
    read_from = source.path.resolve()
    if target.resolve() in (read_from, *read_from.parents):
        raise UsageError(f"{target}: the model itself is read from there: choose another output")


def begun_with(target: Path) -> dict[str, Any]:
    """The fingerprint of an unfinished run for ``target``; empty without one."""
    journal = _read_journal(_partial(target.absolute()) / "journal.json")
    return {} if journal is None else journal["fingerprint"]


class CheckpointWriter:
    """Context manager; see the module. Use in this order: ``write_block`` for each block that is not in
    ``finished``, ``finish``, then ``publish`` or ``reject``.

    Leaving it without publishing keeps the finished blocks for the next run, and nothing if there are none.
    Raises UsageError for a target that may not be replaced, and MachineLimit when another run works on the
    same target or the disk is full (the partial directory is then removed to give the space back).
    """

    def __init__(self, target: Path, fingerprint: dict[str, Any], overwrite: bool) -> None:
        self.target = target.absolute()
        self.partial = _partial(self.target)
        self.finished: dict[int, BlockRecord] = {}
        self._fingerprint = json.loads(json.dumps(fingerprint))  # as it will be read back
        self._overwrite = overwrite
        self._full = False
        self._removed = False
        self._created: list[Path] = []  # parents of the target that were not there, innermost first
        self._lock: IO[bytes] | None = None
        self._built = self.partial / "checkpoint"
        self._aside = self.target.with_name(f".{self.target.name}.replaced")
        self._check_target()

    def __enter__(self) -> "CheckpointWriter":
        missing = [path for path in self.target.parents if not path.exists()]
        with self._disk():
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.partial / "lock", self.target)
            self._created = missing
            if self._aside.exists() and not self.target.exists():
                self._aside.rename(self.target)
            self._resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._full or not self.finished:
            self._remove_partial()
        if self._lock is not None:
            self._lock.close()

    def require_space(self, needed: int) -> None:
        """Raise MachineLimit unless the disk has ``needed`` bytes for this job (less what it already wrote)."""
        written = sum((self._blocks / record.file).stat().st_size for record in self.finished.values())
        free = shutil.disk_usage(self.partial).free
        if needed - written > free:
            raise MachineLimit(
                f"{self.target}: about {needed - written:,} bytes are needed and {free:,} are free: free some or choose another output"
            )

    def write_block(self, index: int, tensors: dict[str, Tensor], records: list[dict[str, Any]]) -> None:
        """Store a block's tensors and journal it as finished."""
        name = f"block-{index:05d}.safetensors"
        with self._disk():
            self._blocks.mkdir(exist_ok=True)
            temporary = self._blocks / f"{name}.new"
            digest = write_safetensors(temporary, tensors)
            temporary.rename(self._blocks / name)
            _sync_directory(self._blocks)
            self.finished[index] = BlockRecord(index, name, digest, records)
            self._write_journal()

    def read_block(self, index: int) -> dict[str, Tensor]:
        """The tensors of a finished block."""
        entries, _ = read_header(self._blocks / self.finished[index].file)
        return {name: read_tensor(entry) for name, entry in entries.items()}

    def finish(
        self, source: Source, config: dict[str, Any], sidecar: dict[str, Any], replaced: set[str]
    ) -> Path:
        """Assemble the checkpoint and return the directory it is in, not published yet.

        Its tensors are the finished blocks' and the source's, less those named in ``replaced``, in shards of
        at most 5 GB. ``config`` becomes ``config.json`` and ``sidecar``, with the shards' hashes as ``files``,
        ``compression.json``; the source's other files are copied, its README as ``README.source.md``.
        """
        refuse_source(self.target, source)
        tensors = {name: entry for name, entry in source.tensors.items() if name not in replaced}
        for record in self.finished.values():
            entries, _ = read_header(self._blocks / record.file)
            for name, entry in entries.items():
                if name in tensors:
                    raise InputRefused(f"{tensors[name].file}: holds {name}, which quantization would write")
                tensors[name] = entry
        with self._disk():
            shutil.rmtree(self._built, ignore_errors=True)
            self._built.mkdir()
            digests = _write_shards(self._built, tensors)
            for path in carried_files(source.path):
                copy = self._built / carried_name(path)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(source.path / path, copy)
                _sync_file(copy)
            _write_json(self._built / "config.json", config)
            _write_json(self._built / SIDECAR, {**sidecar, "files": digests})
            _sync_directory(self._built)
        return self._built

    def build(self) -> Path:
        """An empty directory for a checkpoint that something else writes, to be published as one from ``finish`` is."""
        with self._disk():
            shutil.rmtree(self._built, ignore_errors=True)
            self._built.mkdir()
        return self._built

    def publish(self) -> None:
        """Put the finished checkpoint at the target. An existing one is replaced, or left as it was if that fails."""
        self._check_target()
        with self._disk():
            existed = self.target.exists()
            if existed:
                self.target.rename(self._aside)
            try:
                self._built.rename(self.target)
            except BaseException:
                if existed:
                    self._aside.rename(self.target)
                raise
            _sync_directory(self.target.parent)
            if existed:
                _remove(self._aside)
            self.finished = {}
            self._remove_partial()

    def reject(self) -> Path:
        """Move a checkpoint that failed verification to ``NAME.rejected``, and return that path."""
        rejected = self.target.with_name(f"{self.target.name}.rejected")
        with self._disk():
            _remove(rejected)
            self._built.rename(rejected)
            self.finished = {}
            self._remove_partial()
        return rejected

    @property
    def _blocks(self) -> Path:
        return self.partial / "blocks"

    def _check_target(self) -> None:
        # A run that was killed between publish's two renames left the old checkpoint aside.
        existing = next((path for path in (self.target, self._aside) if path.exists()), None)
        if existing is None:
            return
        if not self._overwrite:
            raise UsageError(f"{existing}: already exists: choose another output or pass --overwrite")
        # What gets replaced gets deleted, so it has to look like something this program would write.
        if not existing.is_dir() or (any(existing.iterdir()) and not (existing / "config.json").exists()):
            raise UsageError(
                f"{existing}: is not a checkpoint (no config.json): not overwritten, choose another output"
            )

    def _resume(self) -> None:
        journal = _read_journal(self.partial / "journal.json")
        if journal is not None and journal["fingerprint"] == self._fingerprint:
            for record in journal["blocks"]:
                file = self._blocks / record.file
                if file.is_file() and file_sha256(file) == record.sha256:
                    self.finished[record.index] = record
                else:
                    note(f"{file}: damaged since it was written: block {record.index} is done again")
            if self.finished:
                note(f"{self.target}: going on after {len(self.finished)} finished blocks")
            return
        if journal is not None and journal["blocks"]:
            note(f"{self.target}: an unfinished run with other settings was found: starting over")
        for path in self.partial.iterdir():
            if path.name != "lock":
                _remove(path)
        self._write_journal()

    def _write_journal(self) -> None:
        blocks = [asdict(record) for _, record in sorted(self.finished.items())]
        file = self.partial / "journal.json"
        temporary = self.partial / "journal.json.new"
        _write_json(temporary, {"fingerprint": self._fingerprint, "blocks": blocks})
        temporary.rename(file)
        _sync_directory(self.partial)

    def _remove_partial(self) -> None:
        if self._removed:  # by now, the directory may be another run's
            return
        shutil.rmtree(self.partial, ignore_errors=True)
        self._removed = True
        with suppress(OSError):  # not empty: something else is in there
            for path in self._created:
                path.rmdir()

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Turn the operating system's refusals to write into one line."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._full = True
                raise MachineLimit(f"{self.target}: the disk is full: free space and run it again") from None
            raise MachineLimit(
                f"{error.filename or self.target}: cannot be written ({error.strerror})"
            ) from None


def _locked(file: Path, target: Path) -> IO[bytes]:
    while True:
        stream = file.open("ab")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            raise MachineLimit(
                f"{target}: another run is writing it: wait for it or choose another output"
            ) from None
        # The run that held the lock may have removed the directory meanwhile: then this locked nothing.
        with suppress(FileNotFoundError):
            if file.stat().st_ino == os.fstat(stream.fileno()).st_ino:
                return stream
        stream.close()
        file.parent.mkdir(parents=True, exist_ok=True)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _read_journal(file: Path) -> dict[str, Any] | None:
    try:
        journal = json.loads(file.read_text("utf-8"))
        blocks = [BlockRecord(**record) for record in journal["blocks"]]
        return {"fingerprint": journal["fingerprint"], "blocks": blocks}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_shards(directory: Path, tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """Write the tensors in the order of their names, as one file or as shards with an index.

    Returns the SHA-256 of each file.
    """
    shards: list[dict[str, TensorEntry]] = [{}]
    size = 0
    for name in sorted(tensors, key=_natural):
        if shards[-1] and size + tensors[name].nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += tensors[name].nbytes
    if len(shards) == 1:
        return {SINGLE: write_safetensors(directory / SINGLE, shards[0])}
    digests: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        digests[file] = write_safetensors(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(entry.nbytes for entry in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return digests


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _write_json(file: Path, value: Any) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2, ensure_ascii=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
