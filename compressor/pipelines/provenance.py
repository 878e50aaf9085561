"""The report section about the command itself, the same for every command."""

import time
from datetime import UTC, datetime
from typing import Any

from compressor import __version__
from compressor.evaluation.facts import environment
from compressor.reports.schema import Environment, Tool


def tool_section(command: str, arguments: dict[str, Any], *, seed: int, device: str, started: float) -> Tool:
    """Who made the report, when and where; ``started`` is ``time.monotonic()`` at the command's start."""
    return Tool(
        version=__version__,
        command=command,
        arguments=arguments,
        seed=seed,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        environment=Environment.of(environment(device)),
    )
