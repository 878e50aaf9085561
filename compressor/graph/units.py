"""What is in a model: blocks, the linear layers in them, and the units an engine fuses.

A *unit* is the smallest thing that may have a numeric format of its own. vLLM (and every engine like it)
fuses the query, key and value projections of a layer into one matrix, and gate and up likewise, so
their formats must agree. Units are found from the module graph and the table below; the user never needs
to know them.
"""

import re
from dataclasses import dataclass

from torch import nn

from compressor.errors import InputRefused
from compressor.graph.skeleton import Skeleton

# kind of unit -> the last name components of the siblings that engines fuse into one matrix
FUSED: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up": ("gate_proj", "up_proj"),
    "qkv_bert": ("query", "key", "value"),
}
# Small layers that steer the computation: kept as they are, at a negligible cost in bytes.
_ROUTERS = re.compile(r"\.(gate|router|shared_expert_gate)$")


@dataclass(frozen=True)
class Linear:
    """One linear layer: ``name`` is its module path, its weight is [out_features, in_features]."""

    name: str
    out_features: int
    in_features: int
    bias: bool

    @property
    def numel(self) -> int:
        return self.out_features * self.in_features


@dataclass(frozen=True)
class Unit:
    """Linear layers that must share one format. ``block`` is the index of the block they are in."""

    name: str
    kind: str
    block: int
    layers: tuple[Linear, ...]

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)


@dataclass(frozen=True)
class ModelGraph:
    """``blocks`` are module paths in the order of computation; ``kept`` maps every other module with a
    matrix in it to the reason why it is not quantized by default. ``embedding`` and ``head`` are the
    module paths of the input and output embeddings (``head`` is empty for models without one)."""

    blocks: tuple[str, ...]
    units: tuple[Unit, ...]
    kept: dict[str, str]
    embedding: str
    head: str

    @property
    def layers(self) -> tuple[Linear, ...]:
        return tuple(layer for unit in self.units for layer in unit.layers)

    def units_of(self, block: int) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.block == block)


def discover(skeleton: Skeleton) -> ModelGraph:
    """Find blocks and units. Raises InputRefused when the model has no stack of blocks with linear layers."""
    model = skeleton.module
    blocks = _blocks(model)
    if not blocks:
        raise InputRefused(
            f"{skeleton.source.path}: {type(model).__name__} has no stack of blocks with linear layers to quantize"
        )

    units: list[Unit] = []
    kept: dict[str, str] = {}
    for index, block in enumerate(blocks):
        layers = {}
        for path, module in model.get_submodule(block).named_modules():
            name = f"{block}.{path}"
            if isinstance(module, nn.Linear):
                if _ROUTERS.search(name):
                    kept[name] = "router"
                else:
                    layers[name] = Linear(
                        name, module.out_features, module.in_features, module.bias is not None
                    )
        units += _fuse(layers, index)

    embedding = _path_of(model, model.get_input_embeddings())
    head = _path_of(model, model.get_output_embeddings()) if hasattr(model, "get_output_embeddings") else ""
    inside = tuple(f"{block}." for block in blocks)
    for name, module in model.named_modules():
        if not name or name.startswith(inside):
            continue
        if name == head:
            kept[name] = "output embedding"
        elif name == embedding:
            kept[name] = "input embedding"
        elif isinstance(module, nn.Linear | nn.Embedding):
            kept[name] = "outside the blocks"
    return ModelGraph(tuple(blocks), tuple(units), kept, embedding, head)


def _blocks(model: nn.Module) -> list[str]:
    """The module list with the most linear parameters in it: the stack of transformer blocks."""
    best: list[str] = []
    most = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        children = [(f"{name}.{key}", child) for key, child in module.named_children()]
        linears = [m for _, child in children for m in child.modules() if isinstance(m, nn.Linear)]
        size = sum(m.weight.numel() for m in linears)
        if size > most:
            best, most = [path for path, _ in children], size
    return best


def _fuse(layers: dict[str, Linear], block: int) -> list[Unit]:
    units: list[Unit] = []
    placed: set[str] = set()
    for name, layer in layers.items():
        if name in placed:
            continue
        parent, _, leaf = name.rpartition(".")
        for kind, members in FUSED.items():
            siblings = [f"{parent}.{member}" for member in members]
            if leaf in members and all(s in layers for s in siblings):
                label = kind.partition("_bert")[0]
                units.append(Unit(f"{parent}.{label}", label, block, tuple(layers[s] for s in siblings)))
                placed.update(siblings)
                break
        else:
            units.append(Unit(name, _kind(name), block, (layer,)))
            placed.add(name)
    return units


def _kind(name: str) -> str:
    """A short name for a layer's role, the same in every block: ``o``, ``down``, …"""
    parent, _, leaf = name.rpartition(".")
    if leaf == "dense":  # BERT calls three layers so, and only their parents tell them apart
        if parent.endswith("attention.output"):
            return "o"
        return "up" if parent.endswith("intermediate") else "down"
    return leaf.removesuffix("_proj")


def _path_of(model: nn.Module, wanted: nn.Module | None) -> str:
    return next(
        (name for name, module in model.named_modules() if wanted is not None and module is wanted), ""
    )
