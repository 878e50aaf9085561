"""Measure a few whole plans, and let them correct the prediction."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from compressor.console import note
from compressor.errors import InputRefused
from compressor.formats import parse_format
from compressor.planning.build import Allocation
from compressor.planning.calibrate import Calibration, Point
from compressor.sensitivity.figure import drawn
from compressor.sensitivity.interactions import cross_matrix
from compressor.sensitivity.measured import last_hidden, measure_plan, measure_selected, stream_of
from compressor.sensitivity.probes import scored_positions
from compressor.sensitivity.scan import ScanJob, ScanSettings, prepare
from compressor.sensitivity.schema import Sensitivity
from compressor.sources.tensors import file_sha256

_MOST_MEASURED = 24

Replaced = dict[tuple[str, str], float]


@dataclass(frozen=True)
class MeasureSettings:
    """Text to measure on (None: as in the scan) and where."""

    data: str | None = None
    samples: int = 16
    sequence_length: int = 256
    seed: int = 0
    trust_remote_code: bool = False


def open_job(scan: Sensitivity, settings: MeasureSettings, device: torch.device) -> ScanJob:
    """The model that was scanned, ready to be measured. Raises InputRefused when its weights have changed."""
    job = prepare(
        ScanSettings(
            model=scan.model,
            formats=scan.formats,
            rounding=scan.rounding,
            data=settings.data or scan.data,
            column=None if settings.data else scan.column,
            split=None if settings.data else scan.split,
            samples=settings.samples,
            sequence_length=settings.sequence_length,
            # Another seed than the scan's takes other sequences of the same text.
            seed=settings.seed + 1,
            trust_remote_code=settings.trust_remote_code,
        ),
        device,
    )
    digests = "".join(file_sha256(file) for file in job.source.weight_files)
    if hashlib.sha256(digests.encode()).hexdigest() != scan.weights_sha256:
        raise InputRefused(f"{scan.model}: its weights are not those that were scanned: scan again")
    return job


def predicted_damage(
    scan: Sensitivity, formats: dict[str, str], replaced: Replaced, interactions: bool
) -> float:
    """Second-order KL of a plan in nats per token, ``replaced`` damages standing in for the scan's."""
    names = [(unit.name, formats[unit.name]) for unit in scan.units]
    total = sum(
        replaced.get(name, unit.formats[name[1]].damage) for unit, name in zip(scan.units, names, strict=True)
    )
    if interactions and scan.factor:
        total += float(cross_matrix(scan, names).sum())
    return max(total, 0.0)


def spread_out(curve: Sequence[Allocation], count: int) -> list[Allocation]:
    """``count`` plans of a Pareto curve, evenly spaced in the logarithm of their damage."""
    usable = [plan for plan in curve if plan.damage > 0]
    if len(usable) <= count:
        return usable
    logs = np.log([plan.damage for plan in usable])
    targets = np.linspace(logs.max(), logs.min(), count)
    picked = dict.fromkeys(int(np.argmin(np.abs(logs - target))) for target in targets)
    return [usable[index] for index in picked]


def measure_points(
    scan: Sensitivity, job: ScanJob, plans: Sequence[Allocation], replaced: Replaced, interactions: bool
) -> list[Point]:
    """Whole-model KL of each plan on the job's text."""
    baseline = last_hidden(job)
    tokens = int(scored_positions(job.skeleton, stream_of(job)).sum())
    points = []
    for number, plan in enumerate(plans):
        note(f"measuring plan {number + 1} of {len(plans)} ({plan.bits:.2f} bits)")
        kl = np.array(measure_plan(job, plan.formats, baseline))
        points.append(
            Point(
                bits=plan.bits,
                bytes=plan.bytes,
                predicted=predicted_damage(scan, plan.formats, replaced, interactions),
                measured=float(kl.sum()) / tokens,
                stderr=float(kl.std(ddof=1) * len(kl) ** 0.5) / tokens if len(kl) > 1 else 0.0,
            )
        )
    return points


def measure_broken(
    scan: Sensitivity, job: ScanJob, calibration: Calibration, plans: Sequence[Allocation], workdir: Path
) -> Replaced:
    """Measured damages for the units where the second-order model breaks down.

    Those are the most damaged ones of the plans that the calibration misses, formats of up to three bits first;
    at most 24 are measured.
    """
    wanted: dict[tuple[str, str], float] = {}
    for plan, point in zip(plans, calibration.points, strict=True):
        if point in calibration.broken:
            for unit in scan.units:
                name = plan.formats[unit.name]
                if parse_format(name).quantized:
                    wanted[unit.name, name] = unit.formats[name].damage
    order = sorted(wanted, key=lambda c: (parse_format(c[1]).bits > 3, -wanted[c]))[:_MOST_MEASURED]
    if not order:
        return {}
    note(f"the second-order model misses by more than 30 %: measuring {len(order)} units one at a time")
    return measure_selected(job, frozenset(order), workdir)


def scatter(calibration: Calibration, file: Path) -> None:
    """Predicted against measured KL of the measured plans, on logarithmic axes."""
    with drawn(file, 4.2, 4) as figure:
        axis = figure.subplots()
        x = [calibration(point.predicted) for point in calibration.points]
        y = [point.measured for point in calibration.points]
        axis.errorbar(
            x, y, yerr=[1.96 * p.stderr for p in calibration.points], fmt="o", markersize=4, capsize=2
        )
        ends = [min(x + y) / 1.5, max(x + y) * 1.5]
        axis.plot(ends, ends, color="gray", linewidth=1)
        axis.fill_between(ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color="gray", alpha=0.2)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("calibrated prediction (nats per token)")
        axis.set_ylabel("measured KL (nats per token)")
