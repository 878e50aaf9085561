"""The ``compressor`` command: registers the subcommands and turns every failure into one line and an exit code."""

import os
import signal
import sys
from typing import Annotated, Any

# Large pages halve the time of CPU work on large activations; torch reads this once, when it is imported.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import typer

from compressor import __version__
from compressor.cli import diagnose, distill, evaluate, gate, inspect, plan, quantize, run, scan, verify
from compressor.console import err
from compressor.errors import INTERRUPTED, CompressorError

# click's class, or in newer versions of typer that of the click it carries along, which has no public name.
_BadUsage: Any = typer.BadParameter.__bases__[0]

_EXIT_CODES = """\
Exit codes: 0 done and verified · 1 unexpected failure · 2 bad usage or recipe · 3 a gate failed ·
4 verification failed · 5 input refused · 6 this machine cannot (disk, memory, package) · 130 interrupted"""

app = typer.Typer(
    name="compressor",
    help="Compress transformer models and prove the result.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PIPELINE, _STEPS, _LOOK = "Whole pipeline", "Steps", "Look and check"
app.command(rich_help_panel=_PIPELINE)(run.run)
app.command(rich_help_panel=_STEPS)(distill.distill)
app.command("scan-sensitivity", rich_help_panel=_STEPS)(scan.scan_sensitivity)
app.command(rich_help_panel=_STEPS)(plan.plan)
app.command(rich_help_panel=_STEPS)(quantize.quantize)
app.command(rich_help_panel=_LOOK)(inspect.inspect)
app.command(rich_help_panel=_LOOK)(verify.verify)
app.command(rich_help_panel=_LOOK)(evaluate.evaluate)
app.command(rich_help_panel=_LOOK)(gate.gate)
app.command(rich_help_panel=_LOOK)(diagnose.diagnose)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"compressor {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (may stand anywhere).")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. Results go to standard output; notes, progress and errors to standard error."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(app(args=arguments, standalone_mode=False) or 0)
    except CompressorError as error:
        if debug:
            raise
        _fail(" ".join(str(error).split()), error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except _BadUsage as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted: run the same command again to go on where it stopped", INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        summary = " ".join(str(error).split())[:300]
        _fail(f"unexpected {type(error).__name__}: {summary} (run again with --debug for the traceback)", 1)


def _fail(message: str, code: int) -> None:
    if err.is_terminal:
        err.print("[bold red]error[/bold red] ", end="")
        err.print(message, markup=False, highlight=False, soft_wrap=True)
    else:
        print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
