"""Open a checkpoint and its original side by side, and refuse pairs that are none, before any forward pass."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compressor.checkpoint.artifact import Artifact, open_artifact
from compressor.checkpoint.file_checks import Failed, Skipped, decoded
from compressor.checkpoint.source_checks import Pair, check_source
from compressor.errors import InputRefused
from compressor.formats import DENSE, Format
from compressor.graph import ModelGraph, Skeleton, Unit, build_skeleton, load, set_weight
from compressor.sensitivity.scan import ScanJob, ScanSettings, prepare
from compressor.sources.model import open_model
from compressor.sources.tensors import read_header

_UNRELATED = (
    0.9  # of a weight's norm: what the median layer may differ by (two bits: 0.6; other weights: 1.4)
)


@dataclass(frozen=True)
class DiagnoseSettings:
    """What to compare, on which text. ``tries`` fixes are carried out and measured; ``memory`` is GiB of
    activations at once; ``iterations`` are those of adaround, for a fix that re-rounds."""

    original: str
    compressed: str
    data: str = "builtin"
    column: str | None = None
    split: str | None = None
    samples: int = 32
    sequence_length: int = 256
    draws: int = 4
    tries: int = 3
    iterations: int = 50
    engine: str | None = None
    memory: float = 1.0
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class DiagnoseJob:
    """``scan`` holds the original and the tokens. ``twin`` is the same architecture whose stored tensors are the
    checkpoint's; what is quantized in it is filled in by :func:`load_compressed`. ``formats`` are by layer name."""

    settings: DiagnoseSettings
    scan: ScanJob
    artifact: Artifact
    twin: Skeleton
    formats: dict[str, Format]

    @property
    def graph(self) -> ModelGraph:
        return self.scan.graph

    @property
    def original(self) -> Skeleton:
        return self.scan.skeleton

    def format_of(self, unit: Unit) -> Format:
        return self.formats.get(unit.layers[0].name, DENSE)


def open_job(settings: DiagnoseSettings, device: torch.device) -> DiagnoseJob:
    """Every check that needs no forward pass.

    Raises InputRefused naming what is at fault when the checkpoint is not quantized, not of this architecture, or not
    made from this original; UsageError for impossible data settings.
    """
    opened = open_model(
        settings.compressed, trust_remote_code=settings.trust_remote_code, allow_quantized=True
    )
    artifact = open_artifact(opened.path)
    formats: dict[str, Format] = {}
    for layer, fmt in artifact.formats.items():
        if fmt is None:
            raise InputRefused(f"{opened.path}: {layer} has a scheme that compressor has no name for")
        formats[layer] = fmt
    if not formats:
        raise InputRefused(f"{opened.path}: holds no quantized tensors: nothing to diagnose")
    scan = prepare(
        ScanSettings(
            model=settings.original,
            formats=("w8", *sorted({fmt.name for fmt in formats.values()})),
            score="output-mse",  # asks for no head; whether there is one is seen below
            draws=settings.draws,
            data=settings.data,
            column=settings.column,
            split=settings.split,
            samples=settings.samples,
            sequence_length=settings.sequence_length,
            memory=settings.memory,
            seed=settings.seed,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        ),
        device,
    )
    _check_pair(scan, artifact)
    for unit in scan.graph.units:
        found = [formats.get(layer.name, DENSE) for layer in unit.layers]
        if len(set(found)) > 1:
            listed = ", ".join(f"{la.name} {f}" for la, f in zip(unit.layers, found, strict=True))
            raise InputRefused(f"{opened.path}: engines fuse {listed}, which need one format")
    return DiagnoseJob(settings, scan, artifact, _twin(scan, artifact), formats)


def weight_of(job: DiagnoseJob, layer: str) -> Tensor:
    """What an engine computes with for a quantized layer, in the job's dtype, on its device."""
    try:
        weight = decoded(job.artifact, layer).dequantize(job.original.dtype)
    except (Failed, Skipped) as reason:
        raise InputRefused(f"{job.artifact.path}: {reason}") from None
    return weight.to(device=job.scan.device, dtype=job.scan.dtype)


def load_compressed(job: DiagnoseJob, index: int) -> nn.Module:
    """Block ``index`` with the checkpoint's weights."""
    path = job.graph.blocks[index]
    block = load(job.twin, path, dtype=job.scan.dtype, device=job.scan.device)
    for layer in (layer.name for unit in job.graph.units_of(index) for layer in unit.layers):
        if layer in job.formats:
            set_weight(block, f"{layer.removeprefix(f'{path}.')}.weight", weight_of(job, layer))
    return block


def with_ends(job: DiagnoseJob, directory: Path) -> DiagnoseJob:
    """The job with what is quantized outside the blocks (a head) decoded into a file in ``directory``, so that
    everything outside them loads like any other tensor."""
    inside = {layer.name for layer in job.graph.layers}
    outside = [layer for layer in job.formats if layer not in inside]
    if not outside:
        return job
    file = directory / "outside.safetensors"
    save_file({f"{layer}.weight": weight_of(job, layer).cpu().contiguous() for layer in outside}, file)
    return replace(job, twin=replace(job.twin, stored=job.twin.stored | read_header(file)[0]))


def _twin(scan: ScanJob, artifact: Artifact) -> Skeleton:
    twin = build_skeleton(scan.source)
    stored = {
        name: artifact.tensors[entry.name]
        for name, entry in twin.stored.items()
        if name.removesuffix(".weight") not in artifact.formats
    }
    return replace(twin, stored=stored)


def _check_pair(scan: ScanJob, artifact: Artifact) -> None:
    """Raise InputRefused unless ``artifact`` is a quantized form of the scanned model."""
    ours, theirs = artifact.config.get("architectures"), scan.source.config.get("architectures")
    where, original = artifact.path, scan.source.path
    if ours != theirs:
        raise InputRefused(
            f"{where}: is a {_listed(ours)}, and {original} a {_listed(theirs)}: not one model"
        )
    pair = Pair(artifact, scan.source)
    try:
        originals = pair.originals
    except Failed as reason:
        raise InputRefused(f"{where}: not made from {original}: {reason}") from None
    for name, entry in scan.skeleton.stored.items():
        layer = name.removesuffix(".weight")
        if layer in artifact.formats and name.endswith(".weight"):
            continue
        kept = artifact.tensors.get(entry.name)
        if kept is None or kept.shape != entry.shape:
            what = "is missing" if kept is None else f"has shape {list(kept.shape)}, not {list(entry.shape)}"
            raise InputRefused(f"{where}: not made from {original}: {entry.name} {what}")
    if artifact.sidecar is not None:
        try:
            check_source(pair)
        except Failed as reason:
            raise InputRefused(f"{where}: not made from {original}: {reason}") from None
    distances = []
    for layer in originals:
        try:
            weight = decoded(artifact, layer).dequantize(torch.float32)
        except (Failed, Skipped) as reason:
            raise InputRefused(f"{where}: {reason}") from None
        before = scan.skeleton.read(f"{layer}.weight").float()
        if weight.shape != before.shape:
            raise InputRefused(
                f"{where}: not made from {original}: {layer} is {list(weight.shape)}, not {list(before.shape)}"
            )
        distances.append(float((weight - before).norm() / before.norm().clamp(min=1e-30)))
    median = sorted(distances)[len(distances) // 2]
    if not median < _UNRELATED:
        raise InputRefused(
            f"{where}: not made from {original}: half of its layers differ by {median:.2f} of their weights' norm or more"
        )


def _listed(architectures: object) -> str:
    return (
        ", ".join(map(str, architectures)) if isinstance(architectures, list) else "model of no named class"
    )
