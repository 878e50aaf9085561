"""A scan as a table and as a heat map."""

from itertools import takewhile
from pathlib import Path

from rich.table import Table

from compressor.sensitivity.figure import drawn
from compressor.sensitivity.schema import Sensitivity, UnitScores


def fragile_table(scan: Sensitivity, rows: int = 12) -> Table:
    """The most fragile units: those that the smallest scanned format damages most."""
    names = [name for name in scan.formats if name != "bf16"]
    what = "relative output error" if scan.score == "output-mse" else "KL in nats per token"
    # Every name begins alike, and a terminal has no room for it.
    shared = shared_path([unit.name for unit in scan.units])
    table = Table(title=f"most fragile of {len(scan.units)} units: {what}")
    table.add_column(f"unit ({shared}.…)" if shared else "unit", overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    for unit in sorted(scan.units, key=_worst, reverse=True)[:rows]:
        table.add_row(unit.name.removeprefix(f"{shared}."), *(_cell(unit, name) for name in names))
    return table


def shared_path(names: list[str]) -> str:
    """The leading components that all ``names`` have in common, each keeping at least its last."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))


def _cell(unit: UnitScores, name: str) -> str:
    score = unit.formats.get(name)
    if score is None:
        return ""
    if not score.stderr or not score.damage:
        return f"{score.damage:.3g}"
    return f"{score.damage:.3g} ± {100 * score.stderr / score.damage:.0f} %"


def _worst(unit: UnitScores) -> float:
    return max(score.damage for score in unit.formats.values())


def heat_map(scan: Sensitivity, file: Path) -> None:
    """Blocks × unit kinds for every quantized format, on one logarithmic scale; ``file`` ends in .svg, .png or .pdf.

    Raises MachineLimit when matplotlib is not installed.
    """
    import numpy as np

    names = [name for name in scan.formats if name != "bf16"]
    kinds = list(dict.fromkeys(unit.kind for unit in scan.units))
    blocks = max(unit.block for unit in scan.units) + 1
    grids = {name: np.full((blocks, len(kinds)), np.nan) for name in names}
    for unit in scan.units:
        for name in names:
            if name in unit.formats:
                cell = grids[name][unit.block, kinds.index(unit.kind)]
                grids[name][unit.block, kinds.index(unit.kind)] = np.nansum([cell, unit.formats[name].damage])
    values = np.concatenate([grid.ravel() for grid in grids.values()])
    positive = values[np.isfinite(values) & (values > 0)]

    with drawn(file, 1.6 + 1.5 * len(names), 1.6 + 0.19 * blocks) as figure:
        from matplotlib.colors import LogNorm

        norm = LogNorm(positive.min(), positive.max()) if len(positive) else None
        axes = figure.subplots(1, len(names), squeeze=False)[0]
        image = None
        for axis, name in zip(axes, names, strict=True):
            image = axis.imshow(grids[name], norm=norm, aspect="auto", cmap="viridis")
            axis.set_title(name)
            axis.set_xticks(range(len(kinds)), kinds, rotation=60, ha="right")
            axis.set_xlabel("unit kind")
        axes[0].set_ylabel("block")
        label = "relative output error" if scan.score == "output-mse" else "ΔKL (nats per token)"
        if image is not None:
            figure.colorbar(image, ax=list(axes), label=label)
        figure.suptitle("sensitivity by block, unit kind and format")
