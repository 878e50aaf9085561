"""Run the command line in this process, engines included: a fresh interpreter for each would take most of the time."""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from compressor.checkpoint import engine_transformers, reload
from compressor.cli.main import main


def run_here(*arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of ``compressor ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["compressor", *map(str, arguments)]),
        patch.object(reload, "run_process", _engine_here),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def _engine_here(command: list[str], directory: Path, environment: dict[str, str]) -> str:
    before = os.getcwd()
    os.chdir(directory)
    try:
        with patch.object(sys, "argv", command[2:]):
            engine_transformers.main()
    finally:
        os.chdir(before)
    return ""
