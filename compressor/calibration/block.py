"""Round the units of one block in the order in which data reaches them.

Each unit sees inputs that have already passed through every rounded layer before it, in this block and
in the blocks before (the "quantized prefix"). When all sequences fit in one batch this costs a single
forward pass: the forward is held at each unit until it is rounded. Otherwise the block is replayed up to
the next unit that is not yet rounded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from compressor.calibration.gram import Gram
from compressor.calibration.stream import Stream, run
from compressor.formats import Format, fake_quantize_activations
from compressor.graph import Unit
from compressor.graph.experts import all_tokens_seen

# (unit, mean of x xᵀ or None if no token reached it, tokens seen) -> rounded weight per layer name
RoundUnit = Callable[[Unit, Tensor | None, int], dict[str, Tensor]]


class _UnitReached(Exception):
    """Raised to leave a block's forward at the unit that is being measured."""


def calibrate_block(
    stream: Stream,
    block: nn.Module,
    index: int,
    units: tuple[Unit, ...],
    formats: dict[str, Format],
    round_unit: RoundUnit,
    last_pass: AbstractContextManager[None] | None = None,
) -> None:
    """Round ``units`` of ``block`` with ``round_unit`` and advance the stream to the block's new outputs.

    ``formats`` maps layer names to formats, for the activation quantization that later layers see.
    The returned weights replace those of the block's layers. ``last_pass`` is entered around the pass of all batches
    in which every layer computes with its rounded weight.
    """
    path = _prefix(units) if units else ""
    modules = {
        layer.name: block.get_submodule(layer.name.removeprefix(path)) for u in units for layer in u.layers
    }
    stage_of = {part.name: stage for unit in units for stage in unit.parts for part in stage}
    units = tuple(part for unit in units for part in unit.by_input)
    unit_of = {layer.name: unit for unit in units for layer in unit.layers}
    waiting = {unit.name for unit in units}
    measuring: tuple[Unit, ...] | None = None  # in this pass: parts of one unit that read values of their own
    grams: dict[str, Gram] = {}
    one_batch = len(stream.batches) == 1
    valid: Tensor | None = None

    def finish(unit: Unit) -> None:
        waiting.discard(unit.name)
        gram = grams.pop(unit.name, None)
        seen = gram.tokens if gram else 0
        for name, weight in round_unit(unit, gram.mean() if gram and seen else None, seen).items():
            modules[name].weight = nn.Parameter(weight, requires_grad=False)

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        unit, fmt = unit_of[name], formats[name]

        def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal measuring
            x = fake_quantize_activations(args[0], fmt)
            if unit.name in waiting:
                if measuring is not None and unit not in measuring:
                    raise _UnitReached
                gram = grams.setdefault(unit.name, Gram(x.shape[-1], x.device))
                flat = x.reshape(-1, x.shape[-1])
                gram.add(flat if valid is None or len(valid) != len(flat) else flat[valid])
                if one_batch:
                    finish(unit)
                elif len(stage_of[unit.name]) > 1:
                    measuring = stage_of[unit.name]  # its other parts follow
                else:
                    raise _UnitReached
            return (x, *args[1:])

        return before

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        with torch.inference_mode(), all_tokens_seen(block):
            while waiting and not one_batch:
                before_pass = len(waiting)
                for number in range(len(stream.batches)):
                    valid = _valid(stream, number)
                    measuring = None
                    try:
                        run(stream, block, index, number)
                    except _UnitReached:
                        continue
                for unit in [u for u in units if u.name in grams]:
                    finish(unit)
                if len(waiting) == before_pass:
                    break
            measuring = None
            with last_pass or nullcontext():
                for number, batch in enumerate(stream.batches):
                    valid = _valid(stream, number)
                    stream.hidden[batch] = run(stream, block, index, number).to(stream.hidden.device)
            for unit in units:
                if unit.name in waiting:  # no token reached it: an expert that was never chosen
                    finish(unit)
    finally:
        for handle in handles:
            handle.remove()


def _valid(stream: Stream, number: int) -> Tensor | None:
    mask = stream.valid[stream.batches[number]]
    return None if bool(mask.all()) else mask.reshape(-1).to(stream.device)


def _prefix(units: tuple[Unit, ...]) -> str:
    """The path of the block that holds ``units``, with its final dot."""
    first = units[0].layers[0].name.split(".")
    at = next(i for i, part in enumerate(first) if part.isdigit())
    return ".".join(first[: at + 1]) + "."
