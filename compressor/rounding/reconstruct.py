"""Block reconstruction: learn a block's codes and scales so that its output is the original block's.

The block reads what the quantized blocks before it give (the "quantized prefix") and is held to what the
original model has at this place, so that it also makes up for errors made before it (asymmetric
reconstruction, as in AdaRound, arXiv 2004.10568; by blocks as in BRECQ, arXiv 2102.05426). It starts from codes
that are rounded already (GPTQ's), and ends in the best of what it has seen on held-out sequences, the start included.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compressor.calibration.stream import Stream, call_of, plain_call
from compressor.formats import Format, QuantizedWeight, fake_quantize_activations
from compressor.rounding.learned import LearnedWeight

_WARM_UP = 5
_CHECKS = 5  # evaluations on held-out sequences
_PATIENCE = 3  # … without a gain, after which it stops
_BETAS, _EPSILON = (
    (0.9, 0.95),
    1e-15,
)  # gradients of a relative error are tiny: the usual 1e-8 would damp them


@dataclass(frozen=True)
class ReconstructSettings:
    """``iterations`` optimizer steps of one micro-batch each; rates are per step, of values in code units and of
    scales relative to where they begin."""

    iterations: int = 100
    value_rate: float = 0.01
    scale_rate: float = 0.001


@dataclass(frozen=True)
class Reconstruction:
    """``before`` and ``after`` are shares of the output's energy, on held-out sequences where there are any."""

    weights: dict[str, QuantizedWeight]
    before: float
    after: float
    iterations: int
    held_out: int


def reconstruct_block(
    block: nn.Module,
    index: int,
    stream: Stream,
    inputs: Tensor,
    targets: Tensor,
    layers: dict[str, LearnedWeight],
    activations: dict[str, Format],
    settings: ReconstructSettings,
    seed: int,
) -> Reconstruction:
    """Learn ``layers`` (by their path inside ``block``).

    ``inputs`` and ``targets`` are [sequences, length, hidden size]; ``stream`` gives the micro-batches, the calls and
    which tokens are real. ``activations`` are formats of layers whose inputs the engine quantizes.
    """
    numbers = list(range(len(stream.batches)))
    held = numbers[-max(1, len(numbers) // 8) :] if len(numbers) > 3 else []
    training = numbers[: len(numbers) - len(held)]
    checked = held or training
    energy = sum(_energy(stream, number, targets) for number in checked) / len(checked)

    def loss(number: int) -> Tensor:
        batch = stream.batches[number]
        call = plain_call(call_of(stream, index, number))
        x = inputs[batch].to(stream.device)
        weights = {f"{path}.weight": layer().to(x.dtype) for path, layer in layers.items()}
        output = functional_call(block, weights, (x, *call.args), call.kwargs)
        output = output[0] if isinstance(output, tuple) else output
        error = (output.float() - targets[batch].to(stream.device).float()).square().sum(-1)
        return error[stream.valid[batch].to(stream.device)].sum() / energy

    def check() -> float:
        with torch.no_grad():
            return float(sum(loss(number) for number in checked)) / len(checked)

    values, factors = [x.values for x in layers.values()], [x.factor for x in layers.values()]
    rates = (settings.value_rate, settings.scale_rate)
    optimizer = torch.optim.Adam(
        [{"params": p, "lr": r} for p, r in zip((values, factors), rates, strict=True)],
        betas=_BETAS,
        eps=_EPSILON,
    )
    order = _shuffled(training, torch.Generator().manual_seed(seed * 1_000_003 + index))
    every = max(1, settings.iterations // _CHECKS)
    with _quantized_inputs(block, activations):
        before = best = check()
        kept = {path: layer.quantized() for path, layer in layers.items()}
        since_best, step = 0, 0
        for step in range(1, settings.iterations + 1):
            share = min(1.0, step / _WARM_UP) * (1 - (step - 1) / settings.iterations)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
            optimizer.zero_grad()
            loss(next(order)).backward()
            optimizer.step()
            for layer in layers.values():
                layer.keep_in_range()
            if step % every == 0 or step == settings.iterations:
                now = check()
                since_best += 1
                if now < best:
                    best, since_best = now, 0
                    kept = {path: layer.quantized() for path, layer in layers.items()}
                elif since_best == _PATIENCE:
                    break
    return Reconstruction(kept, before, best, step, len(held))


def _energy(stream: Stream, number: int, targets: Tensor) -> float:
    batch = stream.batches[number]
    squares = targets[batch].float().square().sum(-1)
    return max(float(squares[stream.valid[batch]].sum()), torch.finfo(torch.float32).tiny)


def _shuffled(numbers: list[int], generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from (numbers[i] for i in torch.randperm(len(numbers), generator=generator).tolist())


@contextmanager
def _quantized_inputs(block: nn.Module, activations: dict[str, Format]) -> Iterator[None]:
    """Inside, layers see inputs as the engine quantizes them; gradients pass straight through."""

    def hook(fmt: Format) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0]
            return (x + (fake_quantize_activations(x.detach(), fmt) - x.detach()), *args[1:])

        return before

    handles = [
        block.get_submodule(path).register_forward_pre_hook(hook(fmt))
        for path, fmt in activations.items()
        if fmt.activations is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
