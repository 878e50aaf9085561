"""Stream calibration tokens through a model one block at a time.

Only one block's parameters are in memory at any moment, plus the hidden states between blocks. Every
block is called exactly as its model calls it: the model's own forward is run once with its blocks
switched off, and the arguments that each block would have received (masks, rotary embeddings, …) are
recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from compressor.errors import InputRefused
from compressor.formats import Format, fake_quantize_activations
from compressor.graph import ModelGraph, Skeleton, load, unload
from compressor.graph.inputs import is_causal, token_inputs


@dataclass(frozen=True)
class BlockCall:
    """What a model passes to one block besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Later:
    """Stands in a recorded call for output number ``position`` of ``block``, which is known once that has run (T5
    passes the first block's position bias on to the others)."""

    block: int
    position: int


@dataclass
class Stream:
    """Hidden states on their way through the blocks.

    ``hidden`` [sequences, length, hidden size] are the inputs of the next block, updated in place;
    ``valid`` [sequences, length] marks the tokens that are not padding; ``batches`` are the slices of
    sequences that are run together; ``calls[batch][block]`` are the other arguments of each call, known for the
    stacks of blocks that have been entered. ``outputs`` is how many values the blocks of each stack return (0: a
    tensor), ``passed_on[batch, …]`` what blocks have given to later ones.
    """

    input_ids: Tensor
    hidden: Tensor
    valid: Tensor
    batches: list[slice]
    calls: list[list[BlockCall]]
    device: torch.device
    outputs: list[int] = field(default_factory=list)
    passed_on: dict[tuple[int, Later], Any] = field(default_factory=dict)

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

    stream = Stream(
        input_ids,
        torch.empty(0),
        attention_mask.bool(),
        batches,
        [[] for _ in batches],
        device,
    )
    _enter(skeleton, graph, stream, 0, dtype)
    return stream


def enter_block(
    skeleton: Skeleton, graph: ModelGraph, stream: Stream, index: int, *, dtype: torch.dtype
) -> None:
    """Make the stream ready for block ``index``; to be called before it is run.

    Where a decoder begins, the encoder's output is taken in by the model's own code, as every decoder block will
    get it, and the hidden states become the decoder's.
    """
    if index in graph.stages[1:]:
        _enter(skeleton, graph, stream, graph.stages.index(index), dtype)


def _enter(skeleton: Skeleton, graph: ModelGraph, stream: Stream, stage: int, dtype: torch.dtype) -> None:
    """Run the model from the last block before ``stage`` to the first in it, and record the calls of its blocks."""
    first = graph.stages[stage]
    last = (graph.stages[stage + 1] if stage + 1 < len(graph.stages) else len(graph.blocks)) - 1
    hidden: list[Tensor] = []
    outside = [path for path, _ in _top_modules(skeleton.module, graph) if path != graph.head]
    for path in outside:
        load(skeleton, path, dtype=dtype, device=stream.device)
    stream.outputs.append(_count_outputs(skeleton.module, graph, stream, first, last))
    for number in range(len(stream.batches)):
        start, calls = _record(skeleton.module, graph, stream, number, first, last)
        hidden.append(start.to(stream.input_ids.device))
        stream.calls[number] += calls
    stream.hidden = torch.cat(hidden)
    for path in outside:
        unload(skeleton.module.get_submodule(path))


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
    inputs = stream.hidden[stream.batches[number]].to(stream.device, non_blocking=True)
    return call_block(stream, block, index, number, inputs)


def call_block(stream: Stream, block: nn.Module, index: int, number: int, inputs: Tensor) -> Tensor:
    """The output of block ``index`` for other ``inputs`` [batch, length, hidden size] than the stream's own."""
    call = call_of(stream, index, number)
    output = block(inputs, *call.args, **call.kwargs)
    if not isinstance(output, tuple):
        return output
    for batch, wanted in stream.passed_on:
        if batch == number and wanted.block == index:
            stream.passed_on[batch, wanted] = output[wanted.position]
    return output[0]


def call_of(stream: Stream, index: int, number: int) -> BlockCall:
    """The arguments of block ``index`` for batch ``number``, besides its inputs."""
    call = stream.calls[number][index]
    if not stream.passed_on:
        return call

    def filled(value: object) -> object:
        return stream.passed_on[number, value] if isinstance(value, Later) else value

    return BlockCall(pytree.tree_map(filled, call.args), pytree.tree_map(filled, call.kwargs))


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
    last = len(graph.blocks) - 1

    def answer(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _returned(stream, graph, index, final if index == last else hidden)

    with _patched(skeleton.module, graph, answer):
        result = skeleton.module(**_model_inputs(skeleton.module, stream, number))
    return result.logits if getattr(result, "logits", None) is not None else result[0]


class _BlocksReached(Exception):
    """Raised to leave the model's forward once every block's arguments are known."""


def _record(
    model: PreTrainedModel, graph: ModelGraph, stream: Stream, number: int, first: int, last: int
) -> tuple[Tensor, list[BlockCall]]:
    """The inputs of block ``first`` for batch ``number``, and the calls of the blocks from there to ``last``."""
    start: list[Tensor] = []
    calls: list[BlockCall] = []

    def note_call(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index == first - 1:
            hidden = stream.hidden[stream.batches[number]].to(stream.device)
        if index >= first:
            if index == first:
                start.append(hidden)
            calls.append(BlockCall(args, kwargs))
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, Later):
                    stream.passed_on.setdefault((number, value), None)
        if index == last:
            raise _BlocksReached
        return _returned(stream, graph, index, hidden)

    with _patched(model, graph, note_call), torch.inference_mode(), suppress(_BlocksReached):
        model(**_model_inputs(model, stream, number))
    return start[0], calls


def _count_outputs(model: PreTrainedModel, graph: ModelGraph, stream: Stream, first: int, last: int) -> int:
    """How many values the model expects of the blocks from ``first`` to ``last``: 0 for a plain tensor.

    Found by trying: each block gets what the one before it is said to return, which goes wrong at once when the
    model expects something else.
    """

    for count in (2, 3, 1, 0):
        stream.outputs.append(count)
        passed: list[bool] = []

        def at_head(_: nn.Module, args: tuple[Any, ...], passed: list[bool] = passed) -> None:
            passed.append(isinstance(args[0], Tensor))
            raise _BlocksReached

        def note_call(
            index: int,
            hidden: Tensor,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            passed: list[bool] = passed,
        ) -> Any:
            if index == first - 1:
                hidden = stream.hidden[stream.batches[0]].to(stream.device)
            passed.append(isinstance(hidden, Tensor) and hidden.dim() == 3)
            if index > last and any(isinstance(x, Later) for x in pytree.tree_leaves((args, kwargs))):
                passed.append(False)  # a decoder got all that the encoder's last block returned
            if not passed[-1] or index > last:
                raise _BlocksReached
            return _returned(stream, graph, index, hidden)

        head = model.get_submodule(graph.head).register_forward_pre_hook(at_head) if graph.head else None
        try:
            with _patched(model, graph, note_call), torch.inference_mode():
                model(**_model_inputs(model, stream, 0))
        except _BlocksReached:
            pass
        except (TypeError, ValueError, AttributeError, IndexError):
            passed.append(False)
        finally:
            if head is not None:
                head.remove()
        stream.outputs.pop()
        if all(passed):
            return count
    raise InputRefused(
        f"{type(model).__name__}: the blocks of {graph.blocks[first].rpartition('.')[0]} cannot be run one by one"
    )


def _returned(stream: Stream, graph: ModelGraph, index: int, hidden: Tensor) -> Any:
    """What block ``index`` is to return so that the model goes on with ``hidden``."""
    stage = sum(index >= start for start in graph.stages) - 1
    count = stream.outputs[stage]
    return (hidden, *(Later(index, i) for i in range(1, count))) if count else hidden


@contextmanager
def _patched(
    model: nn.Module,
    graph: ModelGraph,
    replacement: Callable[[int, Tensor, tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Replace the forward of every block; its attributes stay visible to the model's own loop."""

    def patch(index: int, block: nn.Module) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
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


def _model_inputs(model: PreTrainedModel, stream: Stream, number: int) -> dict[str, Any]:
    batch = stream.batches[number]
    input_ids, mask = stream.input_ids[batch], stream.valid[batch]
    inputs = token_inputs(model, input_ids.to(stream.device))
    # Right padding needs no mask in a causal model: no real token sees the padding after it.
    if not bool(mask.all()) and not is_causal(model):
        inputs["attention_mask"] = mask.to(device=stream.device, dtype=torch.long)
    if model.config.is_encoder_decoder or is_causal(model):
        inputs["use_cache"] = False
    return inputs


def _top_modules(model: nn.Module, graph: ModelGraph) -> list[tuple[str, nn.Module]]:
    """The largest submodules that hold no block and have parameters, with their paths; without those that text does
    not pass through."""
    found: list[tuple[str, nn.Module]] = []

    def visit(path: str, module: nn.Module) -> None:
        inside = [b for b in graph.blocks if b == path or b.startswith(f"{path}." if path else "")]
        if not inside:
            filled = any(True for _ in (*module.parameters(), *module.buffers()))
            if filled and path not in graph.towers:
                found.append((path, module))
        elif path not in graph.blocks:
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found
