"""What was evaluated and on what: sizes, file identities, versions, machine. No weights are loaded."""

import hashlib
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from compressor import __version__
from compressor.sources.model import Source
from compressor.sources.tensors import TensorEntry, read_tensor

# Stored beside a quantized weight, and no parameters of the model.
_AUXILIARY = tuple(
    f".{owner}{kind}"
    for owner in ("weight", "input", "output", "q", "k", "v")
    for kind in ("_scale", "_scale_inv", "_zero_point", "_global_scale", "_g_idx", "_shape")
)
_BITSANDBYTES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")
_PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors", "datasets", "numpy")


@dataclass(frozen=True)
class FileFacts:
    """One weight file: its size, and the SHA-256 of its safetensors header (names, shapes, dtypes, offsets)."""

    name: str
    bytes: int
    header_sha256: str


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint as stored. ``parameters`` counts the model's weights, however they are packed;
    ``bits_per_weight`` is 8 × bytes of all weight files ÷ parameters."""

    ref: str
    path: str
    revision: str | None
    architecture: str | None
    quantization: str | None
    bytes: int
    parameters: int
    bits_per_weight: float
    files: tuple[FileFacts, ...]


@dataclass(frozen=True)
class Environment:
    """The software and machine of a measurement. ``threads``: CPU threads of one torch operation."""

    versions: dict[str, str]
    platform: str
    device: str
    device_name: str
    threads: int
    memory_bytes: int


def model_facts(source: Source) -> ModelFacts:
    """Sizes and identity of a checkpoint, from its file headers."""
    files = tuple(
        FileFacts(file.name, file.stat().st_size, _header_sha256(file)) for file in source.weight_files
    )
    total = sum(file.bytes for file in files)
    parameters = parameter_count(source.tensors)
    architectures = source.config.get("architectures") or [None]
    quantization = (source.config.get("quantization_config") or {}).get("quant_method")
    return ModelFacts(
        ref=source.ref,
        path=str(source.path),
        revision=source.revision,
        architecture=architectures[0],
        quantization=quantization,
        bytes=total,
        parameters=parameters,
        bits_per_weight=8 * total / parameters if parameters else 0.0,
        files=files,
    )


def parameter_count(tensors: dict[str, TensorEntry]) -> int:
    """Weights of the model behind ``tensors``: packed ones count unpacked, scales and index buffers do not count."""
    count = 0
    for name, entry in tensors.items():
        if name.endswith(_AUXILIARY) or name.endswith(_BITSANDBYTES):
            continue
        if f"{name}.quant_state.bitsandbytes__nf4" in tensors:
            count += 2 * entry.numel  # two values a byte
            continue
        if name.endswith(".weight_packed"):
            shape = tensors.get(name.removesuffix("_packed") + "_shape")
            if shape is not None:
                count += int(read_tensor(shape).prod())
            else:  # the 4-bit float formats store two values a byte and no shape
                count += 2 * entry.numel
        elif entry.torch_dtype.is_floating_point or entry.dtype == "I8":
            count += entry.numel
    return count


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of ``packages`` that are here."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def environment(device: str) -> Environment:
    """Versions and machine, as of now, for work done on ``device``."""
    versions = {"compressor": __version__, "python": platform.python_version()} | installed(_PACKAGES)
    kind = torch.device(device).type
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(torch.device(device))
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = _processor(), psutil.virtual_memory().total
    return Environment(versions, platform.platform(), device, name, torch.get_num_threads(), memory)


def available_memory(device: str) -> int:
    """Bytes that can still be allocated on ``device``; for the CPU, also within the container's limit."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    available = psutil.virtual_memory().available
    try:  # control groups, version 2
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        cache = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    return min(available, int(limit) - used + int(cache.get("inactive_file", 0)))


def _header_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        return hashlib.sha256(prefix + stream.read(int.from_bytes(prefix, "little"))).hexdigest()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} processors)"
