"""A report as Markdown that fits a pull-request comment: verdict first, long tables folded."""

from collections.abc import Callable

import jinja2

from compressor.reports import speed_wording, wording
from compressor.reports.gates import sentence
from compressor.reports.schema import Report

COMMENT_LIMIT = 65_536
"""Characters that GitHub takes in one comment."""

_ROWS = (150, 40, 10, 0)  # rows of a long table, the most that fit
_CELL = 2000  # characters of one piece of text from outside


def render_markdown(report: Report) -> str:
    """The page; tables are cut until it fits, and say where the rest is."""
    for rows in _ROWS:
        text = _render(report, rows)
        if len(text) <= COMMENT_LIMIT:
            return text
    end = "\n\nCut here to fit a comment: the rest is in report.json.\n"
    return text[: COMMENT_LIMIT - len(end)] + end


def cell(text: object) -> str:
    """Text that cannot break out of a Markdown table cell or inject HTML."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("`", "'")
    line = " ".join(escaped.split())
    return line if len(line) <= _CELL else f"{line[:_CELL]}…"


def _render(report: Report, rows: int) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("compressor.reports"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "cell": cell,
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
        gate_sentence=sentence,
        metric_label=wording.label,
        distillation_verdict=wording.distillation_verdict,
        distillation_header=wording.distillation_header,
        distillation_rows=wording.distillation_rows,
        speed_header=speed_wording.speed_header,
        speed_rows=speed_wording.speed_rows,
        speed_facts=speed_wording.speed_facts,
        worst=wording.worst_layers(layers),
        limit=rows,
    )
