"""What is in a model: blocks, the linear layers in them, and the units an engine fuses.

A *unit* is the smallest thing that may have a numeric format of its own. vLLM (and every engine like it)
fuses the query, key and value projections of a layer into one matrix, and gate and up likewise, so
their formats must agree; so must those of all experts of a layer. Units are found from the module graph and the
tables below; the user never needs to know them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from compressor.errors import InputRefused
from compressor.graph.experts import Experts, is_stack
from compressor.graph.inputs import SPEECH, TEXT
from compressor.graph.skeleton import Skeleton

# kind of unit -> the last name components of the siblings that engines fuse into one matrix
FUSED: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "qkv_a": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up": ("gate_proj", "up_proj"),
    "qkv_bert": ("query", "key", "value"),
    "qkv_deberta": ("query_proj", "key_proj", "value_proj"),
    "qkv_distilbert": ("q_lin", "k_lin", "v_lin"),
    "qkv_t5": ("q", "k", "v"),
}
# The same for attention to another sequence, whose queries see other inputs than its keys and values.
_CROSS = ("encoder_attn", "EncDecAttention", "crossattention", "cross_attn")
# Experts: …experts.E.LEAF. Those whose leaf is in here read the layer's input, the others what these give.
_EXPERT = re.compile(r"(?P<stack>.*\bexperts)\.(?P<expert>\d+)\.(?P<leaf>\w+)$")
_EXPERT_INPUTS = frozenset({"gate_proj", "up_proj", "w1", "w3", "fc1", "wi", "linear_v", "v1"})

# What is kept inside the blocks, by name: small, and it steers the computation.
_KEPT: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.(gate|router|shared_expert_gate)$|\.router\."), "router"),
    (re.compile(r"\.(dt_proj|dt_in_proj)$"), "state space: time step"),
    (re.compile(r"\.(A_log|A|D|dt_bias)$"), "state space: parameter"),
)


@dataclass(frozen=True)
class Linear:
    """One linear layer: ``name`` is its module path, its weight is [out_features, in_features].

    ``form`` is what transformers computes it with: a Linear, GPT-2's transposed Conv1D, or a stack of experts.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool
    form: Literal["linear", "conv1d", "expert"] = "linear"

    @property
    def numel(self) -> int:
        return self.out_features * self.in_features

    def scale_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a stored scale in a model of ``dtype``: two, but transformers gives experts the dtype of their scales,
        which has to be the model's."""
        return 4 if self.form == "expert" and dtype == torch.float32 else 2


@dataclass(frozen=True)
class Unit:
    """Linear layers that must share one format. ``block`` is the index of the block they are in.

    ``stages`` are sets of layer names where not all layers read the same values: a stage computes from what the one
    before it gives, and each set in it reads values of its own. Empty if all layers read the same.
    """

    name: str
    kind: str
    block: int
    layers: tuple[Linear, ...]
    stages: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def parts(self) -> tuple[tuple["Unit", ...], ...]:
        """The unit in parts whose layers read the same values, so that one Hessian serves them, stage by stage."""
        if not self.stages:
            return ((self,),)
        layers = {layer.name: layer for layer in self.layers}

        def part(names: tuple[str, ...]) -> Unit:
            name = names[0] if len(names) == 1 else f"{self.name}.{len(names)}"
            return Unit(name, self.kind, self.block, tuple(layers[n] for n in names))

        return tuple(tuple(part(names) for names in stage) for stage in self.stages)

    @property
    def by_input(self) -> tuple["Unit", ...]:
        """All parts, in the order in which data reaches them."""
        return tuple(part for stage in self.parts for part in stage)


@dataclass(frozen=True)
class ModelGraph:
    """``blocks`` are module paths in the order of computation; ``stages`` are the indices of the blocks that a new
    stack begins with (the first, and an encoder-decoder's first decoder block).

    ``kept`` maps every other module with a matrix in it, and every matrix that is a parameter of its own, to the
    reason why it is not quantized by default; ``unsupported`` are those among them that hold what is usually worth
    quantizing, in a form that compressor does not quantize. ``embedding`` and ``head`` are the
    module paths of the input and output embeddings (``head`` is empty for models without one). ``towers`` are the
    modules beside a language model that other inputs than text pass through: vision and audio encoders, projectors."""

    blocks: tuple[str, ...]
    units: tuple[Unit, ...]
    kept: dict[str, str]
    embedding: str
    head: str
    stages: tuple[int, ...] = (0,)
    unsupported: frozenset[str] = field(default_factory=frozenset)
    towers: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[Linear, ...]:
        return tuple(layer for unit in self.units for layer in unit.layers)

    def units_of(self, block: int) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.block == block)


def discover(skeleton: Skeleton) -> ModelGraph:
    """Find blocks and units. Raises InputRefused when the model has no stack of blocks with linear layers, or reads
    neither text nor speech."""
    model = skeleton.module
    if model.main_input_name not in (TEXT, SPEECH):
        raise InputRefused(
            f"{skeleton.source.path}: {type(model).__name__} reads {model.main_input_name}, and only models of text or speech "
            "can be compressed"
        )
    stacks = _stacks(model)
    blocks = [block for stack in stacks for block in stack]
    if not blocks:
        raise InputRefused(
            f"{skeleton.source.path}: {type(model).__name__} has no stack of blocks with linear layers to quantize"
        )

    units: list[Unit] = []
    kept: dict[str, str] = {}
    unsupported: set[str] = set()
    for index, block in enumerate(blocks):
        layers = {}
        for path, module in model.get_submodule(block).named_modules():
            name = f"{block}.{path}"
            reason = _reason(name, module)
            if isinstance(module, nn.Linear) and reason is None:
                layers[name] = _linear(skeleton, name, module)
                continue
            for leaf, parameter in module.named_parameters(recurse=False):
                if sum(size > 1 for size in parameter.shape) < 2 or isinstance(module, nn.Embedding):
                    continue
                matrix = name if leaf == "weight" else f"{name}.{leaf}"
                kept[matrix] = reason or _reason(matrix, module) or _unknown(module)
                if kept[matrix] == _unknown(module):
                    unsupported.add(matrix)
        units += _fuse(layers, index)

    embedding = _path_of(model, model.get_input_embeddings())
    head = _path_of(model, model.get_output_embeddings()) if hasattr(model, "get_output_embeddings") else ""
    towers = towers_of(model)
    inside = tuple(f"{block}." for block in blocks)
    for name, module in model.named_modules():
        if not name or name.startswith(inside):
            continue
        if name == head:
            kept[name] = "output embedding"
        elif name == embedding or skeleton.ties.get(f"{name}.weight") == f"{embedding}.weight":
            kept[name] = "input embedding"
        else:
            reason = "outside the language model" if _within(name, towers) else "outside the blocks"
            for leaf, parameter in module.named_parameters(recurse=False):
                if leaf == "weight" and isinstance(module, nn.Linear | nn.Embedding):
                    kept[name] = reason
                elif sum(size > 1 for size in parameter.shape) > 1:
                    kept[name if leaf == "weight" else f"{name}.{leaf}"] = reason
    starts = tuple(sum(len(stack) for stack in stacks[:i]) for i in range(len(stacks)))
    return ModelGraph(
        tuple(blocks), tuple(units), kept, embedding, head, starts, frozenset(unsupported), towers
    )


def _linear(skeleton: Skeleton, name: str, module: nn.Linear) -> Linear:
    form: Literal["linear", "conv1d", "expert"] = "linear"
    if f"{name}.weight" in skeleton.transposed:
        form = "conv1d"
    elif isinstance(skeleton.module.get_submodule(name.rsplit(".", 2)[0]), Experts):
        form = "expert"
    return Linear(name, module.out_features, module.in_features, module.bias is not None, form)


def _reason(name: str, module: nn.Module) -> str | None:
    """Why what is at ``name`` is kept; None if it is a layer to quantize or unknown."""
    for pattern, reason in _KEPT:
        if pattern.search(name):
            return reason
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "convolution"
    if type(module).__name__.endswith(("Router", "Gate")) and not isinstance(module, nn.Linear):
        return "router"
    return None


def _unknown(module: nn.Module) -> str:
    if is_stack(module):
        return "experts stored as one tensor, which engines load in no quantized format of compressor's"
    return f"{type(module).__name__} is not a layer that compressor quantizes"


def _language_model(model: PreTrainedModel) -> str:
    """The path of the language model in a model that takes more than text; empty for one of text alone."""
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is config or not model.get_output_embeddings():
        return ""
    return _path_of(model, model.get_decoder())


def towers_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The largest modules beside the language model in a model that takes more than text: see :class:`ModelGraph`."""
    language = _language_model(model)
    path = language.split(".") if language else []
    head = model.get_output_embeddings()
    found = []
    for depth, step in enumerate(path):
        parent = ".".join(path[:depth])
        for name, child in model.get_submodule(parent).named_children():
            if name != step and child is not head and any(True for _ in child.parameters()):
                found.append(f"{parent}.{name}" if parent else name)
    return tuple(found)


def _within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _stacks(model: PreTrainedModel) -> list[list[str]]:
    """The stacks of blocks in the order of computation: an encoder's and a decoder's, or the only one."""
    if not model.config.is_encoder_decoder:
        language = _language_model(model)
        stack = [".".join(filter(None, (language, name))) for name in _blocks(model.get_submodule(language))]
        return [stack] if stack else []
    found = []
    for part in (model.get_encoder(), model.get_decoder()):
        path = _path_of(model, part)
        stack = _blocks(part)
        if not path or not stack:
            return []
        found.append([f"{path}.{name}" for name in stack])
    return found


def _blocks(model: nn.Module) -> list[str]:
    """The module list with the most parameters in linear layers: the stack of transformer blocks."""
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


def fused(names: Iterable[str]) -> list[tuple[str, str, list[str]]]:
    """Sets of layers that need one format, among layers called ``names``: (name, kind, layers) of each, in order.

    Siblings count only if all of them are there; every layer is in exactly one set.
    """
    known = dict.fromkeys(names)
    found: dict[str, tuple[str, str, list[str]]] = {}
    placed: set[str] = set()
    for name in known:
        if name in placed:
            continue
        expert = _EXPERT.match(name)
        if expert:
            found.setdefault(expert["stack"], (expert["stack"], "experts", []))[2].append(name)
            continue
        parent, _, leaf = name.rpartition(".")
        for kind, members in FUSED.items():
            siblings = [f"{parent}.{member}" for member in members]
            if leaf in members and all(s in known for s in siblings):
                label = kind.partition("_")[0] if kind.startswith("qkv_") and kind != "qkv_a" else kind
                found[f"{parent}.{label}"] = (f"{parent}.{label}", label, siblings)
                placed.update(siblings)
                break
        else:
            found[name] = (name, _kind(name), [name])
    return list(found.values())


def _fuse(layers: dict[str, Linear], block: int) -> list[Unit]:
    units: list[Unit] = []
    for name, kind, members in fused(layers):
        found = tuple(layers[member] for member in members)
        parent = name.rpartition(".")[0].rpartition(".")[2]
        stages: tuple[tuple[tuple[str, ...], ...], ...] = ()
        if kind == "experts":
            inputs = tuple(n for n in members if n.rpartition(".")[2] in _EXPERT_INPUTS)
            outputs = tuple((n,) for n in members if n not in inputs)
            if all(layer.form == "expert" for layer in found):
                stages = ((inputs,), outputs)  # in calibration, all of them see every token
            else:
                stages = (tuple((n,) for n in inputs), outputs)
            stages = tuple(stage for stage in stages if any(stage))
        elif kind == "qkv" and parent in _CROSS:
            stages = (tuple((n,) for n in members),)
        units.append(Unit(name, kind, block, found, stages))
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
