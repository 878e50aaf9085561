"""Errors a user can cause, and the exit code each one ends in.

Every message is one line that names the file, layer or key at fault and says what to do.
The command line prints it without a traceback (unless ``--debug``) and exits with ``exit_code``.
"""

from typing import ClassVar


class CompressorError(Exception):
    """Base of every expected failure. Exit code 1 is left for the unexpected ones."""

    exit_code: ClassVar[int] = 1


class UsageError(CompressorError):
    """A flag, recipe key or combination of options is wrong."""

    exit_code = 2


class GateFailed(CompressorError):
    """A threshold on the report was not met; the artifact is kept and clearly marked."""

    exit_code = 3


class VerificationFailed(CompressorError):
    """The written artifact is not what was planned."""

    exit_code = 4


class InputRefused(CompressorError):
    """A model or data set is corrupt, unsafe, already quantized, empty or unsupported."""

    exit_code = 5


class MachineLimit(CompressorError):
    """This machine cannot do it: disk or memory is short, or an optional package is missing."""

    exit_code = 6


INTERRUPTED = 130
