"""Recovery of a quantized checkpoint: its weights are trained while they stay quantized, and packed again.

Every quantized layer computes with s · round(v), the same grid as :mod:`compressor.formats`; the values v, in units
of a step, and the scales s are trained as in :mod:`compressor.rounding.learned`. Everything that is not quantized
stays byte for byte as it is in the checkpoint.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compressor.checkpoint import kv_cache
from compressor.checkpoint.artifact import Artifact, open_artifact
from compressor.checkpoint.card import CARD
from compressor.checkpoint.carried_files import carried_files
from compressor.checkpoint.compressed_tensors import decode, encode
from compressor.checkpoint.release import write_release
from compressor.checkpoint.safetensors_file import write_safetensors
from compressor.checkpoint.sidecar import SIDECAR
from compressor.checkpoint.verify import verify
from compressor.errors import InputRefused, VerificationFailed
from compressor.formats import Format
from compressor.formats.quantize import (
    QuantizedWeight,
    fake_quantize_activations,
    grouped,
    on_grid,
    storable,
)
from compressor.rounding.learned import inside_cells, rounded
from compressor.sources.model import Source
from compressor.sources.tensors import INDEX, read_tensor

QUANTIZED_LEARNING_RATE = 1e-2
"""Of values, in steps of the grid; scales move a tenth of it, relative to where they begin."""
_SCALE_SHARE = 0.1

# How near to the border of its rounding cell a weight may begin, in steps. GPTQ leaves many beyond it: all put at
# the border, the first optimizer steps would carry them over together and ruin the model.
_INSIDE = 0.4


class FakeQuantized(nn.Module):
    """Parametrization of a weight [out, in] by values in units of its ``scale`` [out, groups], which is learned
    for integers."""

    def __init__(self, scale: Tensor, fmt: Format, stored: torch.dtype) -> None:
        super().__init__()
        self.start: Tensor
        self.register_buffer("start", scale.float().clone())
        # In a unit of its own, so that one learning rate suits values and scales of any magnitude.
        self.change = nn.Parameter(torch.zeros_like(self.start), requires_grad=fmt.kind == "int")
        self.format, self.stored = fmt, stored

    def scale(self) -> Tensor:
        """As it will be stored, [out, groups] fp32."""
        return storable(self.start * self._factor(), self.stored)

    def _factor(self) -> Tensor:
        return 1 + _SCALE_SHARE * self.change

    def forward(self, values: Tensor) -> Tensor:
        weight = rounded(grouped(values, self.format), self._factor(), self.start, self.format, self.stored)
        return weight.view(values.shape)


@dataclass(frozen=True)
class QuantizedStudent:
    """A quantized checkpoint as an object of training; ``artifact`` is how its files are read."""

    source: Source
    artifact: Artifact

    @property
    def formats(self) -> dict[str, Format]:
        return {layer: fmt for layer, fmt in self.artifact.formats.items() if fmt is not None}


def open_quantized(source: Source) -> QuantizedStudent:
    """Raises InputRefused unless it is a compressed-tensors checkpoint of formats that have a name here."""
    artifact = open_artifact(source.path)
    if kv_cache.declared(artifact.config):
        raise InputRefused(
            f"{source.path}: has scales for a quantized cache, which recovery would outdate: quantize without --kv-cache"
        )
    unknown = sorted(layer for layer, fmt in artifact.formats.items() if fmt is None)
    if unknown or not artifact.formats:
        first = unknown[0] if unknown else "it"
        raise InputRefused(
            f"{source.path}: {first} has no quantized format that can be trained: quantize with compressor"
        )
    return QuantizedStudent(source, artifact)


def make_trainable(model: Any, student: QuantizedStudent) -> Any:
    """Turn ``model``, the original, into the quantized one in place, with the quantized weights to train.

    Its masters are the original's weights, moved into the rounding cells of the stored codes: at first the
    model computes exactly what the checkpoint does, and a weight that was rounded far is nearer to the border.
    """
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    prefix = getattr(model, "base_model_prefix", "")
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, entry in student.artifact.tensors.items():
            layer = name.rpartition(".")[0]
            parameter = own.get(name, own.get(f"{prefix}.{name}"))
            if layer not in student.formats and parameter is not None:
                parameter.copy_(read_tensor(entry))
    for layer, fmt in student.formats.items():
        module = modules.get(layer) or modules.get(f"{prefix}.{layer}")
        if not isinstance(module, nn.Linear):
            raise InputRefused(
                f"{student.source.path}: {layer} is no Linear of {type(model).__name__}: if it is of that model, its experts or "
                "Conv1D cannot be trained while quantized; if not, give its --teacher"
            )
        stored = student.artifact.by_layer[layer]["weight_scale"].torch_dtype
        weight = decode(layer, student.artifact.read(layer), fmt)
        device = module.weight.device
        values = weight.codes.float()
        if fmt.kind == "int":
            values = inside_cells(module.weight.detach().cpu(), weight, _INSIDE).view(values.shape)
        module.weight = nn.Parameter(values.to(device, torch.float32), requires_grad=True)
        quantizer = FakeQuantized(weight.scale.to(device), fmt, stored)
        parametrize.register_parametrization(module, "weight", quantizer, unsafe=True)
        if fmt.activations is not None:
            module.register_forward_pre_hook(_quantize_input(fmt))
    return model


def _quantize_input(fmt: Format) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]
        return x + (fake_quantize_activations(x.detach(), fmt) - x.detach()), *inputs[1:]

    return hook


def packed_layers(model: Any, student: QuantizedStudent) -> dict[str, Tensor]:
    """The stored tensors of all quantized layers.

    Raises VerificationFailed unless what they decode to is, bit for bit, what the model computes with.
    """
    modules = dict(model.named_modules())
    prefix = getattr(model, "base_model_prefix", "")
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for layer, fmt in student.formats.items():
            module = modules.get(layer) or modules[f"{prefix}.{layer}"]
            parts: Any = module.parametrizations["weight"]
            codes = on_grid(parts.original, fmt).to(fmt.code_dtype)
            weight = QuantizedWeight(codes, parts[0].scale(), fmt)
            made = encode(layer, weight, parts[0].stored)
            tensors |= made
            decoded = decode(layer, made, fmt).dequantize(torch.float32)
            if not torch.equal(decoded, module.weight.float().cpu()):
                raise VerificationFailed(f"{layer}: its packed weights are not those it was trained with")
    return tensors


def save_quantized(model: Any, directory: Path, student: QuantizedStudent, note: dict[str, Any]) -> None:
    """Write the checkpoint with the trained layers: same files, same config, everything else copied byte for byte."""
    trained = packed_layers(model, student)
    source = student.source.path
    directory.mkdir(parents=True, exist_ok=True)
    digests = {}
    for file in student.source.weight_files:
        entries = {n: e for n, e in student.artifact.tensors.items() if e.file == file}
        digests[file.name] = write_safetensors(
            directory / file.name, {e.name: trained.get(n, e) for n, e in entries.items()}
        )
    own_card = student.artifact.sidecar is not None  # what it says of the checkpoint is no longer true
    for path in carried_files(source):
        if own_card and str(path) == CARD:
            continue
        (directory / path).parent.mkdir(exist_ok=True, parents=True)
        shutil.copyfile(source / path, directory / path)
    for name in ("config.json", INDEX):
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)
    if student.artifact.sidecar is not None:
        # Its probe told what the checkpoint answered before it was trained.
        changed = student.artifact.sidecar.model_copy(
            update={
                "files": digests, "probe": None, "settings": {**student.artifact.sidecar.settings, "recovery": note},
            }
        )  # fmt: skip
        text = json.dumps(changed.model_dump(mode="json"), indent=2, ensure_ascii=False)
        (directory / SIDECAR).write_text(text + "\n", "utf-8")
        write_release(directory)


def check_saved(directory: Path, original: Source) -> list[str]:
    """Run ``compressor verify``'s checks, with transformers, on the result; returns one line a check.

    Raises VerificationFailed naming the first that did not hold.
    """
    checks = verify(
        directory, source=original, engine="transformers", trust_remote_code=original.trust_remote_code
    )
    for check in checks:
        if not check.passed:
            raise VerificationFailed(f"{directory}: {check.name}: {check.detail}")
    return [f"{check.name}: {check.detail}" for check in checks]
