"""Stream calibration tokens through a model one block at a time.

Only one block's parameters are in memory at any moment, plus the hidden states between blocks. Every
block is called exactly as its model calls it: the model's own forward is run once with its blocks
switched off, and the arguments that each block would have received (masks, rotary embeddings, …) are
recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compressor.formats import Format, fake_quantize_activations
from compressor.graph import ModelGraph, Skeleton, load, unload


@dataclass(frozen=True)
class BlockCall:
    """What a model passes to one block besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Stream:
    """Hidden states on their way through the blocks.

    ``hidden`` [sequences, length, hidden size] are the inputs of the next block, updated in place;
    ``valid`` [sequences, length] marks the tokens that are not padding; ``batches`` are the slices of
    sequences that are run together; ``calls[batch][block]`` are the other arguments of each call.
    """

    input_ids: Tensor
    hidden: Tensor
    valid: Tensor
    batches: list[slice]
    calls: list[list[BlockCall]]
    device: torch.device

    @property
    def tokens(self) -> int:
        return int(self.valid.sum())


def open_stream(
    skeleton: Skeleton,
    graph: ModelGraph,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_bytes: int,
    batch_sequences: int | None = None,
) -> Stream:
    """Run everything before the first block.

    ``input_ids`` and ``attention_mask`` are [sequences, length]. Sequences are batched so that the
    activations inside a block stay below about ``batch_bytes``, at most ``batch_sequences`` together.
    """
    sequences, length = input_ids.shape
    widest = max(max(layer.out_features, layer.in_features) for layer in graph.layers)
    # Inside a block about four activations of the widest layer and two of the residual are alive at once.
    per_token = 6 * widest * dtype.itemsize
    size = max(1, min(sequences, batch_bytes // (per_token * length), batch_sequences or sequences))
    # Equal batches, so that none is left with a tail of another shape.
    size = -(-sequences // -(-sequences // size))
    batches = [slice(i, min(i + size, sequences)) for i in range(0, sequences, size)]

    outside = _outside_blocks(skeleton, graph)
    for path in outside:
        load(skeleton, path, dtype=dtype, device=device)
    hidden: list[Tensor] = []
    calls: list[list[BlockCall]] = []
    for batch in batches:
        first, recorded = _record(
            skeleton.module,
            graph,
            _model_inputs(skeleton.module, input_ids[batch], attention_mask[batch], device),
        )
        hidden.append(first.cpu() if device.type != "cpu" else first)
        calls.append(recorded)
    for path in outside:
        unload(skeleton.module.get_submodule(path))
    return Stream(input_ids, torch.cat(hidden), attention_mask.bool(), batches, calls, device)


def advance(
    stream: Stream, block: nn.Module, index: int, activation_formats: Mapping[nn.Module, Format] | None = None
) -> None:
    """Replace the stream's hidden states by the block's outputs.

    ``activation_formats`` are the formats of layers whose inputs the engine quantizes.
    """
    handles = [
        module.register_forward_pre_hook(lambda _, args, fmt=fmt: (fake_quantize_activations(args[0], fmt),))
        for module, fmt in (activation_formats or {}).items()
        if fmt.activations is not None
    ]
    try:
        with torch.inference_mode():
            for number, batch in enumerate(stream.batches):
                stream.hidden[batch] = run(stream, block, index, number).to(stream.hidden.device)
    finally:
        for handle in handles:
            handle.remove()


def run(stream: Stream, block: nn.Module, index: int, number: int) -> Tensor:
    """The output of block ``index`` for batch ``number``, [batch, length, hidden size], on the stream's device."""
    call = stream.calls[number][index]
    inputs = stream.hidden[stream.batches[number]].to(stream.device, non_blocking=True)
    output = block(inputs, *call.args, **call.kwargs)
    return output[0] if isinstance(output, tuple) else output


def plain_call(call: BlockCall) -> BlockCall:
    """The call with tensors that autograd may keep: recorded ones belong to inference mode."""

    def usable(value: object) -> object:
        return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

    return BlockCall(pytree.tree_map(usable, call.args), pytree.tree_map(usable, call.kwargs))


def outputs(skeleton: Skeleton, graph: ModelGraph, stream: Stream, *, dtype: torch.dtype) -> Tensor:
    """Run everything after the last block on the stream's hidden states: the model's logits
    [sequences, length, vocabulary], or its last hidden state if it has no head."""
    with loaded_ends(skeleton, graph, dtype=dtype, device=stream.device), torch.inference_mode():
        results = [
            tail(skeleton, graph, stream, number, stream.hidden[batch].to(stream.device))
            for number, batch in enumerate(stream.batches)
        ]
    return torch.cat(results)


@contextmanager
def loaded_ends(
    skeleton: Skeleton, graph: ModelGraph, *, dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    """Everything outside the blocks is in memory inside: embeddings, final norm, head."""
    ends = [path for path, _ in _top_modules(skeleton.module, graph)]
    for path in ends:
        load(skeleton, path, dtype=dtype, device=device)
    try:
        yield
    finally:
        for path in ends:
            unload(skeleton.module.get_submodule(path))


def tail(skeleton: Skeleton, graph: ModelGraph, stream: Stream, number: int, final: Tensor) -> Tensor:
    """What the model makes of ``final`` [batch, length, hidden size], the last block's output for batch
    ``number``: logits, or the last hidden state if it has no head. Needs :func:`loaded_ends`."""
    batch = stream.batches[number]
    inputs = _model_inputs(skeleton.module, stream.input_ids[batch], stream.valid[batch], stream.device)
    last = len(graph.blocks) - 1
    with _patched(skeleton.module, graph, lambda index, hidden, a, k: final if index == last else hidden):
        result = skeleton.module(**inputs)
    return result.logits if getattr(result, "logits", None) is not None else result[0]


class _BlocksReached(Exception):
    """Raised to leave the model's forward once every block's arguments are known."""


def _record(model: nn.Module, graph: ModelGraph, inputs: dict[str, Any]) -> tuple[Tensor, list[BlockCall]]:
    first: list[Tensor] = []
    calls: list[BlockCall] = []

    def note_call(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if index == 0:
            first.append(hidden)
        calls.append(BlockCall(args, kwargs))
        if index == len(graph.blocks) - 1:
            raise _BlocksReached
        return hidden

    with _patched(model, graph, note_call), torch.inference_mode(), suppress(_BlocksReached):
        model(**inputs)
    return first[0], calls


@contextmanager
def _patched(
    model: nn.Module,
    graph: ModelGraph,
    replacement: Callable[[int, Tensor, tuple[Any, ...], dict[str, Any]], Tensor],
) -> Iterator[None]:
    """Replace the forward of every block; its attributes stay visible to the model's own loop."""

    def patch(index: int, block: nn.Module) -> None:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if args:
                return replacement(index, args[0], args[1:], kwargs)
            rest = {k: v for k, v in kwargs.items() if k != "hidden_states"}
            return replacement(index, kwargs["hidden_states"], (), rest)

        block.forward = forward

    blocks = [model.get_submodule(path) for path in graph.blocks]
    for index, block in enumerate(blocks):
        patch(index, block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _model_inputs(model: nn.Module, input_ids: Tensor, mask: Tensor, device: torch.device) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": input_ids.to(device)}
    # Right padding needs no mask in a causal model: no real token sees the padding after it.
    if not bool(mask.all()) and not _is_causal(model):
        inputs["attention_mask"] = mask.to(device=device, dtype=torch.long)
    if _is_causal(model):
        inputs["use_cache"] = False
    return inputs


def _is_causal(model: nn.Module) -> bool:
    return "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__


def _top_modules(model: nn.Module, graph: ModelGraph) -> list[tuple[str, nn.Module]]:
    """The largest submodules that hold no block and have parameters, with their paths."""
    found: list[tuple[str, nn.Module]] = []

    def visit(path: str, module: nn.Module) -> None:
        inside = [b for b in graph.blocks if b == path or b.startswith(f"{path}." if path else "")]
        if not inside:
            if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
                found.append((path, module))
        elif path not in graph.blocks:
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


def _outside_blocks(skeleton: Skeleton, graph: ModelGraph) -> list[str]:
    return [path for path, _ in _top_modules(skeleton.module, graph) if path != graph.head]
