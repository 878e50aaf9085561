"""Write a report: ``report.json`` for machines, ``report.md`` for a pull-request comment."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jinja2
from pydantic import ValidationError

from compressor.errors import InputRefused, MachineLimit, UsageError
from compressor.reports import speed_wording, wording
from compressor.reports.schema import Report

REPORT_JSON = "report.json"
REPORT_MARKDOWN = "report.md"
_LAYER_LIMIT = 150  # keeps the page below GitHub's 65,536 characters for a comment


def check_report_directory(directory: Path, *, overwrite: bool = False) -> None:
    """Raise UsageError when a report in ``directory`` would be replaced without ``overwrite``; call before work."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file: give a directory for the report")
    for name in (REPORT_JSON, REPORT_MARKDOWN):
        if (directory / name).exists() and not overwrite:
            raise UsageError(
                f"{directory / name}: already exists: choose another --output or pass --overwrite"
            )


def write_report(report: Report, directory: Path, *, overwrite: bool = False) -> Path:
    """Write both files into ``directory`` (made if needed) and return the JSON's path.

    Each file appears complete or not at all. Raises UsageError when a report is there already and
    ``overwrite`` is false, MachineLimit when the disk refuses.
    """
    check_report_directory(directory, overwrite=overwrite)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_atomically(directory / REPORT_MARKDOWN, render_markdown(report))
        _write_atomically(directory / REPORT_JSON, report_json(report))
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
        raise InputRefused(f"{file}: not a report of this version: {where}: {first['msg']}") from None
    except UnicodeDecodeError:
        raise InputRefused(f"{file}: not a report: it is not UTF-8 text") from None


def report_json(report: Report) -> str:
    """The document as text: keys in the schema's order, floats exactly as they are."""
    document = report.model_dump(mode="json")
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def render_markdown(report: Report) -> str:
    """A page that fits a pull-request comment: verdict first, long tables folded."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("compressor.reports"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "cell": _cell,
        "maybe": lambda value: "–" if value is None else wording.number(value),
        "number": wording.number,
        "percent": wording.percent,
        "estimate": wording.estimate,
        "change": wording.change,
        "size": wording.size,
        "duration": wording.duration,
    }
    environment.filters.update(filters)
    layers = report.quantization.layers if report.quantization else []
    return environment.get_template("report.md.j2").render(
        report=report,
        headline=wording.headline(report),
        metric_label=wording.label,
        distillation_verdict=wording.distillation_verdict,
        distillation_header=wording.distillation_header,
        distillation_rows=wording.distillation_rows,
        speed_header=speed_wording.speed_header,
        speed_rows=speed_wording.speed_rows,
        speed_facts=speed_wording.speed_facts,
        worst=wording.worst_layers(layers),
        layer_limit=_LAYER_LIMIT,
    )


def _cell(text: object) -> str:
    """Text that cannot break out of a Markdown table cell or inject HTML."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("`", "'")
    return " ".join(escaped.split())


def _write_atomically(file: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
