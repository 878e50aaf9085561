"""Drawings of a page: static SVG by matplotlib that takes its colours and font from the page around it.

The same figure gives the same bytes: ids are made from a fixed salt and no date is written. Colours of ink
and series are CSS variables of the page, so that one drawing serves light, dark and paper.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Stand-ins that matplotlib draws with, and what the page puts in their place.
INK, MUTED, GRID, FIRST, SECOND, THIRD = "#010203", "#010204", "#010205", "#010206", "#010207", "#010208"
_VARIABLES = {
    INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)", FIRST: "var(--first)", SECOND: "var(--second)",
    THIRD: "var(--third)",
}  # fmt: skip
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "compressor",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.grid": False,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}


class Drawing:
    """One figure while it is drawn; ``svg`` is set when the context of :func:`drawing` ends."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.svg = ""

    def axes(self, rows: int = 1, columns: int = 1) -> list[Axes]:
        """Axes row by row; of several, they share their y axis."""
        return list(self.figure.subplots(rows, columns, squeeze=False, sharey=rows * columns > 1).ravel())


@contextmanager
def drawing(name: str, description: str, *, width: float = 5.2, height: float = 3.2) -> Iterator[Drawing]:
    """Draw ``width`` × ``height`` inches; ``name`` keeps the ids of drawings on one page apart, and ``description`` is
    what a screen reader says."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        made = Drawing(figure)
        yield made
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        made.svg = _for_page(buffer.getvalue(), name, description)


def _for_page(text: str, name: str, description: str) -> str:
    """The ``svg`` element alone, with ids of its own, the page's colours and font, and a size that follows the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, variable)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    label = description.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    width = re.search(r'width="([\d.]+)pt"', text)
    assert width is not None
    text = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', r"\1", text, count=1)
    points = 1.25 * float(width[1])
    return text.replace(
        "<svg ", f'<svg role="img" aria-label="{label}" style="max-width: {points:.0f}px" ', 1
    ).strip()
