"""A written checkpoint as its files say it is, read with suspicion."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.checkpoint.compressed_tensors import format_of_scheme
from compressor.checkpoint.sidecar import Sidecar, read_sidecar
from compressor.errors import InputRefused
from compressor.formats import Format
from compressor.sources.tensors import TensorEntry, index_directory, read_tensor

_MARKS = (".weight_packed", ".weight_scale")  # tensors that only a quantized layer has


@dataclass(frozen=True)
class Artifact:
    """``formats`` maps every layer that has quantized tensors to its format by the config's groups; None
    is a scheme that compressor has no name for (asymmetric, static activations, …).

    Quantized layers are called as transformers has them in memory, as far as the sidecar says that it has them under
    other names, and so are their tensors in ``tensors``; an entry's own name is the one it is stored under."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    sidecar: Sidecar | None
    formats: dict[str, Format | None]

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @cached_property
    def by_layer(self) -> dict[str, dict[str, TensorEntry]]:
        """The tensors of each module, by their names within it."""
        grouped: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self.tensors.items():
            layer, _, leaf = name.rpartition(".")
            grouped.setdefault(layer, {})[leaf] = entry
        return grouped

    def read(self, layer: str) -> dict[str, Tensor]:
        """The tensors of one layer, by their full names, in memory."""
        return {f"{layer}.{leaf}": read_tensor(entry) for leaf, entry in self.by_layer[layer].items()}


def open_artifact(directory: Path) -> Artifact:
    """The checkpoint in ``directory``. Raises InputRefused when it is not a readable compressed-tensors one."""
    return make_artifact(
        directory, read_json_config(directory), index_directory(directory), read_sidecar(directory)
    )


def make_artifact(
    directory: Path, config: dict[str, Any], tensors: dict[str, TensorEntry], sidecar: Sidecar | None
) -> Artifact:
    """The checkpoint of these parts. Raises InputRefused when its config groups cannot be read."""
    names = {} if sidecar is None else {stored: name for name, stored in sidecar.stored_as.items()}
    called = {}
    for full, entry in tensors.items():
        layer, _, leaf = full.rpartition(".")
        called[f"{names[layer]}.{leaf}" if layer in names and leaf != "bias" else full] = entry
    try:
        formats = formats_of(config["quantization_config"], called)
    except Exception as error:  # third-party JSON of any shape
        raise InputRefused(
            f"{directory / 'config.json'}: its config groups cannot be read ({error!r})"
        ) from None
    return Artifact(directory, config, called, sidecar, formats)


def read_json_config(directory: Path) -> dict[str, Any]:
    """``config.json`` with a compressed-tensors ``quantization_config``.

    Raises InputRefused when it is missing, not JSON, or quantized by another method or not at all.
    """
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InputRefused(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise InputRefused(f"{file}: not valid JSON") from None
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(quantization, dict):
        raise InputRefused(f"{file}: has no quantization_config: not a quantized checkpoint")
    if quantization.get("quant_method") != "compressed-tensors":
        raise InputRefused(
            f"{file}: quant_method is {quantization.get('quant_method')!r}, not compressed-tensors"
        )
    return config


def quantized_layers(tensors: Iterable[str]) -> list[str]:
    """Names of the layers with quantized tensors, sorted."""
    return sorted({name.removesuffix(mark) for name in tensors for mark in _MARKS if name.endswith(mark)})


def group_finder(quantization: dict[str, Any]) -> Callable[[str], list[str]]:
    """A function from a layer's name to the config groups that match it: by name, or else by class.

    Whether the layer is ignored does not matter here.
    """
    exact: dict[str, list[str]] = {}
    patterns: list[tuple[re.Pattern[str], str]] = []
    classes: list[str] = []
    for name, group in (quantization.get("config_groups") or {}).items():
        for target in group.get("targets", ()):
            if target.startswith("re:"):
                patterns.append((re.compile(target.removeprefix("re:")), name))
            elif is_class(target):
                classes.append(name)
            else:
                exact.setdefault(target, []).append(name)

    def find(layer: str) -> list[str]:
        by_name = exact.get(layer, []) + [name for pattern, name in patterns if pattern.match(layer)]
        return list(dict.fromkeys(by_name)) or list(dict.fromkeys(classes))

    return find


def is_class(target: str) -> bool:
    """Whether a target names a class of modules, such as Linear, rather than modules."""
    return not target.startswith("re:") and "." not in target and target[:1].isupper()


def is_ignored(quantization: dict[str, Any], layer: str) -> bool:
    """Whether the config's ``ignore`` names the layer."""
    ignore = quantization.get("ignore") or []
    return layer in ignore or any(
        re.match(pattern.removeprefix("re:"), layer) for pattern in ignore if pattern.startswith("re:")
    )


def formats_of(quantization: dict[str, Any], tensors: Iterable[str]) -> dict[str, Format | None]:
    """Every quantized layer's format, by the first group that matches it."""
    groups = quantization.get("config_groups") or {}
    known = {name: format_of_scheme(group) for name, group in groups.items()}
    find = group_finder(quantization)
    found = {}
    for layer in quantized_layers(tensors):
        names = find(layer)
        found[layer] = known[names[0]] if names else None
    return found
