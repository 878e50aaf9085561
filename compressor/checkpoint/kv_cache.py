"""An FP8 cache of keys and values in a checkpoint: two scales for each attention layer, and the word in ``config.json``.

compressed-tensors calls it ``kv_cache_scheme``. The scales are ``….k_scale`` and ``….v_scale`` beside the attention
layer's projections, float32 [1]; vLLM loads them under these names and then caches in FP8 without being asked.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import InputRefused
from compressor.formats import fake_quantize_kv
from compressor.graph import Skeleton
from compressor.graph.attention import attention_layers, intercept, shared_from
from compressor.sources.tensors import TensorEntry, index_directory, read_tensor

SCHEME: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "group_size": None,
    "dynamic": False,
}
LEAVES = ("k_scale", "v_scale")


def stored_path(skeleton: Skeleton, layer: str) -> str:
    """What the checkpoint calls the attention layer that transformers calls ``layer``."""
    for name, entry in skeleton.stored.items():
        leaf = name.removeprefix(f"{layer}.")
        if leaf != name and entry.name.endswith(f".{leaf}"):
            return entry.name.removesuffix(f".{leaf}")
    return layer


def scale_tensors(layer: str, scales: tuple[float, float]) -> dict[str, Tensor]:
    """The stored tensors of the attention layer called ``layer`` in the checkpoint."""
    return {f"{layer}.{leaf}": torch.tensor([s]) for leaf, s in zip(LEAVES, scales, strict=True)}


def declared(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` says that the cache is quantized."""
    return bool((config.get("quantization_config") or {}).get("kv_cache_scheme"))


def scale_names(layers: Iterable[str]) -> set[str]:
    """The names of all scales of ``layers``."""
    return {f"{layer}.{leaf}" for layer in layers for leaf in LEAVES}


def read_scales(tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[float, float]]:
    """(scale of keys, scale of values) of each layer that has them.

    Raises InputRefused, naming the tensor, for one without its other or that is no single number.
    """
    found = {}
    for layer in dict.fromkeys(n.rpartition(".")[0] for n in tensors if n.endswith((".k_scale", ".v_scale"))):
        pair = []
        for leaf in LEAVES:
            entry = tensors.get(f"{layer}.{leaf}")
            if entry is None:
                raise InputRefused(f"{layer}: has no {leaf}, but the other scale of its cache")
            if entry.numel != 1:
                raise InputRefused(
                    f"{entry.name}: {list(entry.shape)} scales; only one for each tensor is known here"
                )
            pair.append(float(read_tensor(entry).float()))
        found[layer] = (pair[0], pair[1])
    return found


def simulate_cache(model: PreTrainedModel, path: Path) -> None:
    """From now on ``model``, loaded from ``path``, attends to what an FP8 cache with the stored scales would give back.

    Raises InputRefused for an attention layer without scales.
    """
    scales = read_scales(index_directory(path))
    simulate(model, scales, str(path))


def simulate(model: PreTrainedModel, scales: Mapping[str, tuple[float, float]], ref: str) -> None:
    """:func:`simulate_cache` with given ``scales``, by the names of layers in the checkpoint ``ref``."""
    layers = attention_layers(model)
    prefix = model.base_model_prefix
    by_layer = {}
    for name, layer in layers.items():
        names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        stored = next((n for n in names if n in scales), None)
        if stored is None:
            raise InputRefused(
                f"{ref}: config.json has a kv_cache_scheme, but no k_scale and v_scale are stored for {name}"
            )
        by_layer[name] = scales[stored]
        if hasattr(layer, "kv_cache"):
            setattr(layer, "quantization_enabled", False)  # noqa: B010  # compressed-tensors' own simulation, with rounded scales
    own = {name: layer for name, layer in layers.items() if shared_from(layers, name) is None}

    def through_cache(name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        of_keys, of_values = by_layer[name]
        return fake_quantize_kv(keys, of_keys), fake_quantize_kv(values, of_values)

    intercept(own, through_cache)
