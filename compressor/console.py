"""What the user sees while work runs: a progress bar on a terminal, plain log lines elsewhere.

Results go to standard output; progress, notes and errors go to standard error, so that ``--json``
output can be piped. ``NO_COLOR`` is honoured by rich.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

out = Console()
err = Console(stderr=True)


def note(message: str) -> None:
    """One line of information on standard error."""
    if err.is_terminal:
        err.print(message, style="dim", highlight=False, markup=False)
    else:
        print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """One line of warning on standard error."""
    if err.is_terminal:
        err.print(f"warning: {message}", style="yellow", highlight=False, markup=False)
    else:
        print(f"warning: {message}", file=sys.stderr, flush=True)


class Steps:
    """Counts finished steps of one job; made by :func:`steps`."""

    def __init__(self, label: str, total: int | None, progress: Progress | None) -> None:
        self._label, self._total, self._progress = label, total, progress
        self._done = 0
        self._start = self._printed = time.monotonic()
        self._task = progress.add_task(label, total=total) if progress else None

    def advance(self, detail: str = "") -> None:
        """Mark one more step as done; ``detail`` says what was just finished."""
        self._done += 1
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, description=f"{self._label} {detail}")
            return
        now = time.monotonic()
        # A log line at least every 10 s keeps a CI job alive without flooding its log.
        if self._done == self._total or now - self._printed >= 10:
            self._printed = now
            elapsed = now - self._start
            of = "" if self._total is None else f"/{self._total}"
            print(
                f"{self._label}: {self._done}{of} {detail} ({elapsed:.0f} s)",
                file=sys.stderr,
                flush=True,
            )


@contextmanager
def steps(label: str, total: int | None) -> Iterator[Steps]:
    """Show the progress of ``total`` steps named ``label``; of unknown many without it."""
    if not err.is_terminal:
        yield Steps(label, total, None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        yield Steps(label, total, progress)
