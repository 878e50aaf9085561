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
_CHECKS = 8  # evaluations on held-out sequences
_PATIENCE = 4  # … without a gain, after which it stops
_BETAS = (0.9, 0.95)
_EPSILON = 1e-15  # gradients of a relative error are tiny: the usual 1e-8 would damp them
_FAINT = 1e-6  # of the mean energy: a token fainter than that is not held to its own


@dataclass(frozen=True)
class ReconstructSettings:
    """``iterations`` optimizer steps of one micro-batch each; rates are per step, of values in code units and of
    scales relative to where they begin.

    GPTQ's codes are a minimum in themselves and many of its values lie near the border of their cells: a value rate
    that lets them cross it all at once loses more than the steps that follow win back.
    """

    iterations: int = 100
    value_rate: float = 0.003
    scale_rate: float = 0.006


@dataclass(frozen=True)
class Reconstruction:
    """``before`` and ``after`` are the mean over tokens of the error's share of the token's energy, on held-out
    sequences where there are any."""

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
    floor = _FAINT * float(targets[stream.valid].float().square().sum(-1).mean())

    def errors(number: int) -> Tensor:
        """Of each real token, relative to its own energy: the layers after this block see it normalised. The first
        token of a sequence may hold a thousand times the energy of all others, and would be all that is learned."""
        batch = stream.batches[number]
        call = plain_call(call_of(stream, index, number))
        x = inputs[batch].to(stream.device)
        weights = {f"{path}.weight": layer().to(x.dtype) for path, layer in layers.items()}
        output = functional_call(block, weights, (x, *call.args), call.kwargs)
        output = output[0] if isinstance(output, tuple) else output
        wanted = targets[batch].to(stream.device).float()
        energy = wanted.square().sum(-1).clamp(min=max(floor, torch.finfo(torch.float32).tiny))
        error = (output.float() - wanted).square().sum(-1) / energy
        return error[stream.valid[batch].to(stream.device)]

    def check() -> float:
        with torch.no_grad():
            return float(torch.cat([errors(number) for number in checked]).mean())

    values, factors = [x.values for x in layers.values()], [x.factor for x in layers.values()]
    rates = (settings.value_rate, settings.scale_rate)
    optimizer = torch.optim.Adam(
        [{"params": p, "lr": r} for p, r in zip((values, factors), rates, strict=True)],
        betas=_BETAS,
        eps=_EPSILON,
    )
    order = _shuffled(training, torch.Generator().manual_seed(seed * 1_000_003 + index))
    learning = _fast_products(stream.device)
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
            with learning:
                loss = errors(next(order)).mean()
            loss.backward()
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


def _fast_products(device: torch.device) -> torch.autocast:
    """bf16 matrix products for the learning steps where the device has them in hardware: on CPUs three times as fast as
    fp32. What is learned is judged in the precision of the calibration all the same."""
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        fast = bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    else:
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


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
