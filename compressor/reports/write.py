"""Write a report: ``report.json`` for machines, ``report.md`` for a pull-request comment, ``report.html`` to read."""

import json
import os
from pathlib import Path

from pydantic import ValidationError

from compressor.errors import InputRefused, MachineLimit, UsageError
from compressor.reports.html import render_html
from compressor.reports.markdown import render_markdown
from compressor.reports.schema import Report

REPORT_JSON = "report.json"
REPORT_MARKDOWN = "report.md"
REPORT_HTML = "report.html"


def check_report_directory(directory: Path, *, overwrite: bool = False) -> None:
    """Raise UsageError when a report in ``directory`` would be replaced without ``overwrite``; call before work."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file: give a directory for the report")
    for name in (REPORT_JSON, REPORT_MARKDOWN, REPORT_HTML):
        if (directory / name).exists() and not overwrite:
            raise UsageError(
                f"{directory / name}: already exists: choose another --output or pass --overwrite"
            )


def write_report(report: Report, directory: Path, *, overwrite: bool = False) -> Path:
    """Write all three files into ``directory`` (made if needed) and return the JSON's path.

    Each file appears complete or not at all. Raises UsageError when a report is there already and
    ``overwrite`` is false, MachineLimit when the disk refuses.
    """
    check_report_directory(directory, overwrite=overwrite)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / REPORT_HTML, render_html(report))
        write_atomically(directory / REPORT_MARKDOWN, render_markdown(report))
        write_atomically(directory / REPORT_JSON, report_json(report))
    except OSError as error:
        raise MachineLimit(f"{directory}: the report cannot be written ({error.strerror})") from None
    return directory / REPORT_JSON


def read_report(path: Path) -> Report:
    """Read a ``report.json``, or the one in a directory.

    Raises InputRefused naming the file and the first key at fault.
    """
    file = path / REPORT_JSON if path.is_dir() else path
    try:
        return Report.model_validate_json(file.read_text("utf-8"))
    except OSError as error:
        raise InputRefused(f"{file}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        hint = " (another version of compressor made it: make it again)" if where == "schema_version" else ""
        raise InputRefused(f"{file}: not a report of this version: {where}: {first['msg']}{hint}") from None
    except UnicodeDecodeError:
        raise InputRefused(f"{file}: not a report: it is not UTF-8 text") from None


def report_json(report: Report) -> str:
    """The document as text: keys in the schema's order, floats exactly as they are."""
    document = report.model_dump(mode="json")
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_atomically(file: Path, text: str) -> None:
    """Write UTF-8 ``text``: ``file`` is the old one or the new one, never half of it.

    The unfinished file has one name, so that what a killed process leaves is taken up by the next.
    """
    unfinished = file.with_name(f".{file.name}.new")
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
