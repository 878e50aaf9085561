"""What a run directory knows of its steps: ``run.json``.

For each step it holds what the step was made from (settings, digests of inputs, versions) and, once the step is done,
the facts that the report needs. A step is done again when what it is made from has changed or its output is gone,
and only then: the digests of a step's output are part of what later steps are made from, so a change travels just as
far as it matters.
"""

import json
from pathlib import Path
from typing import Any

from compressor.console import note
from compressor.errors import InputRefused, UsageError
from compressor.reports.write import write_atomically

RECORD = "run.json"
STEPS = ("distill", "scan", "plan", "quantize", "evaluate", "speed", "report")


class RunRecord:
    """The record of one run directory; every change is on disk, whole, before the method returns.

    ``overwrite`` forgets all steps and allows outputs that this record does not know to be replaced.
    Raises InputRefused when the file is there and is not a record.
    """

    def __init__(self, directory: Path, *, overwrite: bool = False) -> None:
        self.directory = directory
        self._file = directory / RECORD
        self._overwrite = overwrite
        self._steps: dict[str, dict[str, Any]] = {} if overwrite else self._read()

    def done(self, step: str, made_from: dict[str, Any], output: Path | None) -> bool:
        """Whether ``step`` needs no work. Says why not, when it had been done before."""
        known = self._steps.get(step)
        if known is None or "facts" not in known:
            return False
        if output is not None and not output.exists():
            note(f"{step}: done again, {output} is gone")
            return False
        changed = _difference(known["made_from"], _plain(made_from))
        if changed is not None:
            note(f"{step}: done again, {changed} has changed")
            return False
        note(f"{step}: done before; going on from there")
        return True

    def facts(self, step: str) -> Any:
        """What was found out in a step that is done."""
        return self._steps[step]["facts"]

    def start(self, step: str, made_from: dict[str, Any], output: Path | None) -> bool:
        """Note that ``step`` is about to be made; whether an output at ``output`` may be replaced.

        Raises UsageError when something is there that no step of this directory made.
        """
        known = self._steps.get(step)
        replaceable = self._overwrite or known is not None
        if output is not None and output.exists() and not replaceable:
            raise UsageError(
                f"{output}: already exists, and no run of this directory made it: choose another output or pass --overwrite"
            )
        if known is None or "facts" in known or known["made_from"] != _plain(made_from):
            self._steps[step] = {"made_from": _plain(made_from), "replaces": _identity(output)}
            self._write()
        return replaceable

    def published(self, step: str, made_from: dict[str, Any], output: Path) -> bool:
        """Whether a run that was killed before it could say so had put the finished output in place."""
        known = self._steps.get(step)
        return (
            known is not None
            and "facts" not in known
            and known["made_from"] == _plain(made_from)
            and output.exists()
            and known["replaces"] != _identity(output)
        )

    def finish(self, step: str, facts: Any) -> None:
        """Note that ``step`` is done; ``facts`` is plain data."""
        self._steps[step] = {"made_from": self._steps[step]["made_from"], "facts": facts}
        self._write()

    def forget_from(self, step: str) -> None:
        """Have ``step`` and all that come after it done again; what they made may be replaced.

        Raises UsageError when ``step`` is none.
        """
        if step not in STEPS:
            raise UsageError(f"--from {step}: the steps are {', '.join(STEPS)}")
        for name in STEPS[STEPS.index(step) :]:
            if name in self._steps:
                self._steps[name] = {"made_from": None, "replaces": None}
        self._write()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            data = json.loads(self._file.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            data = None
        if not isinstance(data, dict) or not isinstance(data.get("steps"), dict):
            raise InputRefused(
                f"{self._file}: not the record of a run: choose another output or pass --overwrite"
            )
        return data["steps"]

    def _write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": 1, "steps": self._steps}, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self._file, text)


def _plain(value: Any) -> Any:
    """``value`` as it is after being written and read."""
    return json.loads(json.dumps(value, default=str))


def _identity(output: Path | None) -> list[int] | None:
    """What tells a directory or file from the one that replaces it; None when there is nothing."""
    if output is None or not output.exists():
        return None
    status = output.stat()
    return [status.st_ino, status.st_mtime_ns]


def _difference(old: Any, new: Any, path: str = "") -> str | None:
    """The first key, dotted, in which two plain values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            found = _difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    return None if old == new else path or "everything"
