"""The place of a run: everything is made in ``.NAME.partial/`` beside the output and renamed when it is whole.

A killed run leaves that directory; the same command goes on in it. Another command is told so and does not
throw away the work in it without ``--overwrite``.
"""

import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from compressor.errors import MachineLimit, UsageError


class RunDirectory:
    """Context manager; ``path`` is where to work. ``publish`` moves what is in ``path / "output"`` to the target.
    Of several processes only the ``main`` one prepares and locks it.

    Raises UsageError when the target exists, or holds no checkpoint that may be replaced, or when an
    unfinished run had other settings; MachineLimit when another run is at work.
    """

    def __init__(self, target: Path, settings: dict[str, Any], *, overwrite: bool, main: bool = True) -> None:
        self.target = target.absolute()
        self.path = self.target.with_name(f".{self.target.name}.partial")
        self.output = self.path / "output"
        self._settings = json.loads(json.dumps(settings, default=str))
        self._overwrite = overwrite
        self._lock: IO[bytes] | None = None
        self._main = main
        check_target(self.target, overwrite=overwrite)

    def __enter__(self) -> "RunDirectory":
        if not self._main:
            return self
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise MachineLimit(
                f"{self.target}: another run is writing it: wait or choose another output"
            ) from None
        file = self.path / "settings.json"
        if file.exists():
            known = json.loads(file.read_text("utf-8"))
            differing = sorted(
                key
                for key in known.keys() | self._settings.keys()
                if known.get(key) != self._settings.get(key)
            )
            if differing and not self._overwrite:
                raise UsageError(
                    f"{self.path}: an unfinished run has another {differing[0]} ({known.get(differing[0])}, now "
                    f"{self._settings.get(differing[0])}): repeat its command to go on, or pass --overwrite to start over"
                )
            if differing:
                for path in self.path.iterdir():
                    if path.name != "lock":
                        _remove(path)
        _write_json(file, self._settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()
        # Keep what a next run can use; nothing is worth keeping before the first checkpoint.
        if (
            self._main
            and kind is not None
            and not list(self.path.glob("**/progress.json"))
            and self.path.exists()
        ):
            shutil.rmtree(self.path, ignore_errors=True)

    def publish(self) -> None:
        """Rename the finished output into place, replacing an old one, and remove the rest."""
        aside = self.target.with_name(f".{self.target.name}.replaced")
        _remove(aside)
        if self.target.exists():
            self.target.rename(aside)
        try:
            self.output.rename(self.target)
        except BaseException:
            if aside.exists():
                aside.rename(self.target)
            raise
        _remove(aside)
        with suppress(OSError):
            shutil.rmtree(self.path)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raise UsageError unless ``target`` is free or may be replaced."""
    if not target.exists():
        return
    if not overwrite:
        raise UsageError(f"{target}: already exists: choose another output or pass --overwrite")
    if not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").exists()):
        raise UsageError(
            f"{target}: is not a checkpoint (no config.json): not overwritten, choose another output"
        )


def _write_json(file: Path, value: Any) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
    os.replace(temporary, file)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
