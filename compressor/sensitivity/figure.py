"""A drawing in a file of its own. (Those inside a report's page are made in ``reports.svg``.)"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import MachineLimit

if TYPE_CHECKING:  # matplotlib loads when something is drawn
    from matplotlib.figure import Figure


@contextmanager
def drawn(file: Path, width: float, height: float) -> Iterator["Figure"]:
    """A figure of ``width`` × ``height`` inches, which is in ``file`` (.svg, .png or .pdf) when the context ends.

    The same figure gives the same bytes: ids are made from a fixed salt, and an .svg has no date. Raises MachineLimit
    when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MachineLimit(f"{file}: drawing needs matplotlib: pip install matplotlib") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "compressor", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        unfinished = file.with_name(f".{file.stem}.partial{file.suffix}")
        figure.savefig(unfinished, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=130)
        unfinished.replace(file)
