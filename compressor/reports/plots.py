"""The drawings of a report, each from the report alone and empty when it has nothing to draw.

A model with thousands of modules is drawn as a grid of blocks × kinds, so a drawing stays small and readable.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import BoundaryNorm, LogNorm
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from compressor.reports.schema import Layer, PlanPoint, Report
from compressor.reports.svg import FIRST, INK, MUTED, SECOND, THIRD, drawing

Grid = NDArray[np.float64]


def sensitivity(report: Report) -> str:
    """Heat maps, blocks × unit kinds, of the damage each scanned format would do."""
    scan = report.scan
    if scan is None:
        return ""
    names = [name for name in scan.formats if name != "bf16"]
    kinds = list(dict.fromkeys(unit.kind for unit in scan.units))
    blocks = max(unit.block for unit in scan.units) + 1
    grids: dict[str, Grid] = {}
    for name in names:
        grid = np.full((blocks, len(kinds)), np.nan)
        for unit in scan.units:
            if name in unit.damage:
                at = unit.block, kinds.index(unit.kind)
                grid[at] = np.nansum([grid[at], unit.damage[name]])
        grids[name] = grid
    norm = _log_norm(list(grids.values()))
    if norm is None:
        return ""
    rows = -(-len(names) // 4)
    columns = -(-len(names) // rows)
    with drawing(
        "sensitivity",
        f"Predicted damage of every unit in {', '.join(names)}",
        width=5.2,
        height=rows * (1.2 + _height(blocks)),
    ) as made:
        axes = made.axes(rows, columns)
        for axis, name in zip(axes, names, strict=False):
            mesh = axis.pcolormesh(grids[name], norm=norm, cmap="viridis", edgecolors="none")
            axis.set_title(name)
            _name_columns(axis, kinds)
        for axis in axes[len(names) :]:
            axis.set_visible(False)
        _name_rows(axes[0], blocks)
        for axis in axes[::columns]:
            axis.set_ylabel("block")
        _plain_ticks(made.figure.colorbar(mesh, ax=axes, label=scan.unit, aspect=30).ax.yaxis)
    return made.svg


def bits(report: Report) -> str:
    """Bits a weight of every module, blocks × modules."""
    layers = report.quantization.layers if report.quantization else []
    found = _by_block(layers, lambda layer: layer.bits, np.mean)
    if found is None:
        return ""
    grid, names = found
    levels = sorted({round(float(x), 3) for x in grid[np.isfinite(grid)]})
    if len(levels) > 12:
        levels = sorted(set(np.round(np.linspace(levels[0], levels[-1], 12), 3)))
    with drawing("bits", "Bits a weight of every module", height=1.6 + _height(len(grid))) as made:
        (axis,) = made.axes()
        edges = [
            levels[0] - 0.5,
            *((a + b) / 2 for a, b in pairwise(levels)),
            levels[-1] + 0.5,
        ]
        cmap = colormaps["cividis"].resampled(max(2, len(levels)))
        mesh = axis.pcolormesh(grid, norm=BoundaryNorm(edges, cmap.N), cmap=cmap, edgecolors="none")
        _name_rows(axis, len(grid))
        axis.set_ylabel("block")
        _name_columns(axis, names)
        bar = made.figure.colorbar(mesh, ax=axis, label="bits a weight", spacing="uniform")
        centres = [(a + b) / 2 for a, b in pairwise(edges)]
        bar.set_ticks(centres, labels=[f"{level:g}" for level in levels])
        bar.ax.minorticks_off()
    return made.svg


def layer_errors(report: Report) -> str:
    """Remaining rounding error of every module, blocks × modules."""
    layers = report.quantization.layers if report.quantization else []
    found = _by_block(layers, lambda layer: layer.error_after, np.max)
    if found is None or (norm := _log_norm([found[0]])) is None:
        return ""
    grid, names = found
    unit = (report.quantization.error_unit if report.quantization else None) or "error"
    with drawing("errors", "Rounding error of every module", height=1.6 + _height(len(grid))) as made:
        (axis,) = made.axes()
        mesh = axis.pcolormesh(grid, norm=norm, cmap="viridis", edgecolors="none")
        _name_rows(axis, len(grid))
        axis.set_ylabel("block")
        _name_columns(axis, names)
        _plain_ticks(made.figure.colorbar(mesh, ax=axis, label=unit).ax.yaxis)
    return made.svg


def pareto(report: Report) -> str:
    """Predicted KL against size along the frontier, measured plans, and the plan that was carried out."""
    planning = report.planning
    if planning is None or planning.chosen.predicted is None:
        return ""
    frontier = [point for point in planning.frontier if point.predicted]
    with drawing("pareto", "Predicted KL against bits a weight, with the chosen plan") as made:
        (axis,) = made.axes()
        if frontier:
            axis.plot([p.bits for p in frontier], [p.predicted or 0 for p in frontier], "o-", color=FIRST, markersize=3, linewidth=1.2, label="cheapest plans")  # fmt: skip
        _measured(axis, planning.measured, lambda point: point.bits)
        axis.plot(
            planning.chosen.bits, planning.chosen.predicted, "*", color=THIRD, markersize=13, label="chosen"
        )
        _logarithmic(axis, "y")
        axis.set_xlabel("bits a weight in the units")
        axis.set_ylabel("KL, nats per token")
        axis.grid(True, which="major")
        axis.legend()
    return made.svg


def predicted_measured(report: Report) -> str:
    """Measured against predicted KL of whole plans; the checkpoint's own KL where it was evaluated."""
    planning = report.planning
    if planning is None:
        return ""
    points = [point for point in planning.measured if point.predicted and point.measured]
    kl = report.evaluation.metrics.get("kl") if report.evaluation else None
    final = kl.compressed if kl is not None and planning.chosen.predicted else None
    values = [x for point in points for x in (point.predicted or 0, point.measured or 0)]
    values += [final.value, planning.chosen.predicted or 0] if final is not None else []
    values = [value for value in values if value > 0]
    if not values:
        return ""
    with drawing("predicted", "Measured against predicted KL of whole plans") as made:
        (axis,) = made.axes()
        ends = [0.7 * min(values), 1.4 * max(values)]
        axis.plot(ends, ends, "--", color=MUTED, linewidth=1, label="equal")
        _measured(axis, points, lambda point: point.predicted or 0)
        if final is not None and final.value > 0 and planning.chosen.predicted:
            low, high = (
                (final.value - (final.low or 0), (final.high or 0) - final.value)
                if final.low is not None and final.high is not None
                else (0.0, 0.0)
            )
            axis.errorbar(planning.chosen.predicted, final.value, [[low], [high]], fmt="*", color=THIRD, markersize=12, capsize=3, label="this checkpoint")  # fmt: skip
        _logarithmic(axis, "xy")
        axis.set_xlabel("predicted KL, nats per token")
        axis.set_ylabel("measured KL, nats per token")
        axis.grid(True, which="major")
        axis.legend()
    return made.svg


def learning_curve(report: Report) -> str:
    """The student's metric on the evaluation data over its steps, and the control's."""
    found = report.distillation
    points = [p for p in found.curve if p.metric is not None] if found else []
    if found is None or len(points) < 2:
        return ""
    with drawing("curve", f"{found.curve_metric} over training steps") as made:
        (axis,) = made.axes()
        axis.plot([p.step for p in points], [p.metric or 0 for p in points], "o-", color=FIRST, markersize=3, linewidth=1.2, label="student")  # fmt: skip
        control = [p for p in found.control_curve if p.metric is not None]
        if control:
            axis.plot([p.step for p in control], [p.metric or 0 for p in control], "s--", color=SECOND, markersize=3, linewidth=1.2, label="control")  # fmt: skip
        axis.axvline(found.best_step, color=THIRD, linewidth=1, linestyle=":", label="best")
        axis.set_xlabel("step")
        axis.set_ylabel(found.curve_metric.replace("_", " "))
        axis.grid(True, which="major")
        axis.legend()
    return made.svg


def _logarithmic(axis: Axes, which: str) -> None:
    """Logarithmic axes with plain numbers."""
    for name in which:
        getattr(axis, f"set_{name}scale")("log")
        _plain_ticks(getattr(axis, f"{name}axis"))


def _plain_ticks(axis: Axis) -> None:
    """Numbers such as 0.02 at 1, 2 and 5 of each decade; beyond two decades, at each decade only."""
    low, high = axis.get_view_interval()
    wide = low > 0 and high / low > 100
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _measured(axis: Axes, points: Sequence[PlanPoint], x: Callable[[PlanPoint], float]) -> None:
    points = [point for point in points if point.measured]
    if not points:
        return
    errors = [1.96 * (point.stderr or 0) for point in points]
    # On a logarithmic axis the lower end must stay above zero.
    lower = [min(error, 0.99 * (point.measured or 0)) for error, point in zip(errors, points, strict=True)]
    axis.errorbar(
        [x(point) for point in points],
        [point.measured or 0 for point in points],
        [lower, errors],
        fmt="s",
        color=SECOND,
        markersize=4,
        capsize=3,
        label="measured",
    )


def _by_block(
    layers: Sequence[Layer],
    value: Callable[[Layer], float | None],
    join: Callable[[list[float]], float],
) -> tuple[Grid, list[str]] | None:
    """Values as [blocks, kinds] with the kinds' names; experts of one kind are joined. None without any value."""
    cells: dict[tuple[int, str], list[float]] = {}
    for layer in layers:
        number = value(layer)
        place = _place(layer.module)
        if number is not None and place is not None:
            cells.setdefault(place, []).append(number)
    if not cells:
        return None
    names = list(dict.fromkeys(name for _, name in cells))
    grid = np.full((max(block for block, _ in cells) + 1, len(names)), np.nan)
    for (block, name), numbers in cells.items():
        grid[block, names.index(name)] = join(numbers)
    return grid, names


def _height(blocks: int) -> float:
    """Inches for a grid of so many blocks: no less than the words beside it need."""
    return min(max(0.14 * blocks, 1.6), 5.0)


def _place(module: str) -> tuple[int, str] | None:
    """``model.layers.3.mlp.experts.7.up_proj`` is block 3, kind ``mlp.experts.*.up_proj``; None outside of blocks."""
    found = re.fullmatch(r".*?\.(\d+)\.(.+)", f".{module}")
    if found is None:
        return None
    return int(found[1]), re.sub(r"\.\d+(?=\.|$)", ".*", found[2])


def _name_rows(axis: Axes, blocks: int) -> None:
    """Block 0 on top, and a number beside every block, or every fifth or tenth."""
    step = next(step for step in (1, 2, 5, 10, 20, 50) if blocks / step <= 14 or step == 50)
    shown = range(0, blocks, step)
    axis.set_ylim(blocks, 0)
    axis.set_yticks([block + 0.5 for block in shown], [str(block) for block in shown])


def _name_columns(axis: Axes, names: list[str]) -> None:
    shown = [name.rsplit(".", 1)[-1] for name in names]
    if len(set(shown)) < len(shown):
        shown = names
    axis.set_xticks(
        [i + 0.5 for i in range(len(names))], shown, rotation=60, ha="right", rotation_mode="anchor"
    )
    axis.tick_params(length=0)
    axis.set_facecolor("none")
    axis.title.set_color(INK)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _log_norm(grids: list[Grid]) -> LogNorm | None:
    values = np.concatenate([grid.ravel() for grid in grids])
    positive = values[np.isfinite(values) & (values > 0)]
    if not len(positive):
        return None
    low, high = float(positive.min()), float(positive.max())
    return LogNorm(low, high if high > low else low * math.e)
