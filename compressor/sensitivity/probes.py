"""Second-order KL of weight errors, from random directions in logit space.

For small changes Δz of the logits z, with p = softmax(z),

    KL(p ‖ softmax(z + Δz)) ≈ ½ Δzᵀ F Δz,    F = diag(p) − p pᵀ,

the Fisher information (equally the Gauss-Newton matrix of the KL). F = R Rᵀ with R = diag(√p) − p √pᵀ, so for
a vector ε of independent signs E[(εᵀ Rᵀ Δz)²] = Δzᵀ F Δz. One backward pass from Rε gives its gradient
δ at the output of every layer, and an error e of that output contributes a = Σ_t δ_t · e_t. Hence, from the
same passes, for every plan whose errors are e_1, e_2, … (first order in each)

    KL ≈ ½ E[(a_1 + a_2 + …)²]    summed over the tokens of a sequence.

The products δ_t · e_t of single tokens are kept; :mod:`compressor.sensitivity.damage` makes scores of them.

Signs instead of labels sampled from the model (the usual Fisher estimate) have the same mean; they
also move every token by the same amount, where sampled labels leave confident tokens mostly at rest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.calibration.stream import Stream, call_of, plain_call, tail
from compressor.errors import InputRefused
from compressor.formats import Format, fake_quantize_activations
from compressor.graph import ModelGraph, Skeleton, Unit
from compressor.graph.experts import all_tokens_seen
from compressor.graph.inputs import is_causal

Column = tuple[str, str]  # unit name, format name


@dataclass(frozen=True)
class Candidate:
    """One unit in one format: ``errors`` holds ΔW [out, in] of each of its layers."""

    unit: Unit
    format: Format
    errors: dict[str, Tensor]

    @property
    def column(self) -> Column:
        return (self.unit.name, self.format.name)


@dataclass
class BlockProbes:
    """What a block's candidates did to every token.

    ``products`` [draws, n, length] holds δ_t · e_t, written in place; ``relative`` is |e|²/|y|² (y without bias) of
    each sequence and layer, summed over both, as a 0-d tensor: a ratio of sums would hear only the few tokens
    and layers with the largest outputs.
    """

    products: dict[Column, Tensor] = field(default_factory=dict)
    relative: dict[Column, Tensor] = field(default_factory=dict)


def head_gradients(
    skeleton: Skeleton, graph: ModelGraph, stream: Stream, number: int, final: Tensor, draws: int, seed: int
) -> Tensor:
    """Gradients of ``draws`` random directions at the last block's output, [draws, batch, length, hidden size].

    ``final`` [batch, length, hidden size] is that output. Only positions that predict a real token count.
    Directions depend on the seed and the batch's number only. Needs :func:`loaded_ends`.
    """
    final = final.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        logits = tail(skeleton, graph, stream, number, final)
    scored = scored_positions(skeleton, stream)[stream.batches[number]].to(logits.device)
    with torch.no_grad():
        chance = logits.detach().float().softmax(-1)
        chance[~scored] = 0
        root = chance.sqrt()
    generator = torch.Generator(logits.device).manual_seed(seed * 1_000_003 + number)
    gradients = []
    for draw in range(draws):
        signs = torch.randint(0, 2, root.shape, generator=generator, dtype=torch.bool, device=root.device)
        direction = torch.where(signs, root, -root)  # √p ε
        direction.addcmul_(chance, direction.sum(-1, keepdim=True), value=-1)  # (diag(√p) − p √pᵀ) ε
        (gradient,) = torch.autograd.grad(
            logits, final, direction.to(logits.dtype), retain_graph=draw < draws - 1
        )
        gradients.append(gradient.detach())
    return torch.stack(gradients)


def scored_positions(skeleton: Skeleton, stream: Stream) -> Tensor:
    """Positions whose prediction is compared, bool [sequences, length]: those that predict a real next token,
    or, in a model that is not causal, every real token."""
    valid = stream.valid
    if not is_causal(skeleton.module):
        return valid
    scored = torch.zeros_like(valid)
    scored[:, :-1] = valid[:, :-1] & valid[:, 1:]
    return scored


def score_batch(
    stream: Stream,
    block: nn.Module,
    index: int,
    number: int,
    hidden: Tensor,
    gradients: Tensor,
    modules: dict[str, nn.Linear],
    candidates: Sequence[Candidate],
    into: BlockProbes,
) -> Tensor:
    """Score the candidates of ``block`` on one batch and return the gradients at the block's input.

    ``hidden`` [batch, length, hidden size] is the block's input, ``gradients`` [draws, batch, length, hidden
    size] those at its output (draws may be 0). ``modules`` are the block's layers by name. One output error is
    alive at a time, so memory does not depend on the number of formats.
    """
    draws = len(gradients)
    hidden = hidden.detach().clone().requires_grad_(draws > 0)
    with torch.set_grad_enabled(draws > 0), all_tokens_seen(block), _seen(modules, hidden.shape[:2]) as seen:
        call = plain_call(call_of(stream, index, number))
        output = block(hidden, *call.args, **call.kwargs)
        output = output[0] if isinstance(output, tuple) else output
    names = list(seen)
    if missing := next((name for name in modules if name not in seen), None):
        raise InputRefused(f"{missing}: sees routed tokens, which a scan does not support")
    targets = [hidden, *(seen[name][1] for name in names)]
    per_draw = [
        torch.autograd.grad(output, targets, gradients[d].to(output.dtype), retain_graph=d < draws - 1)
        for d in range(draws)
    ]
    batch = stream.batches[number]
    padding = ~stream.valid[batch].to(hidden.device) if not bool(stream.valid[batch].all()) else None
    with torch.no_grad():
        # [batch, length, draws, out]: one small product for each token
        at_output = {
            name: torch.stack([g[1 + i].reshape(*hidden.shape[:2], -1) for g in per_draw], dim=-2)
            if draws
            else None
            for i, name in enumerate(names)
        }
        for candidate in candidates:
            _score(candidate, modules, seen, at_output, hidden.shape[:2], padding, batch, into)
    return torch.stack([g[0] for g in per_draw]) if draws else gradients


def _score(
    candidate: Candidate,
    modules: dict[str, nn.Linear],
    seen: dict[str, tuple[Tensor, Tensor]],
    at_output: dict[str, Tensor | None],
    shape: torch.Size,
    padding: Tensor | None,
    batch: slice,
    into: BlockProbes,
) -> None:
    column = candidate.column
    products: Tensor | None = None
    for name, delta in candidate.errors.items():
        x, y = (value.reshape(*shape, -1) for value in seen[name])
        weight, bias = modules[name].weight, modules[name].bias
        y = y if bias is None else y - bias
        # The error itself, never a difference of two outputs: bf16 could not hold it.
        rounded_x = fake_quantize_activations(x, candidate.format)
        error = functional.linear(rounded_x, delta.to(x.device, non_blocking=True))
        if candidate.format.activations is not None:
            error += functional.linear(rounded_x - x, weight)
        if padding is not None:
            error[padding] = 0
            y = y.masked_fill(padding[..., None], 0)
        energy = y.float().square().sum((1, 2)).clamp_(min=torch.finfo(torch.float32).tiny)
        ratio = error.float().square().sum((1, 2)) / energy
        into.relative[column] = into.relative.get(column, 0) + ratio.sum()
        gradient = at_output[name]
        if gradient is not None:
            part = (gradient @ error[..., None])[..., 0].float()
            products = part if products is None else products + part
    if products is not None:
        into.products[column][:, batch] = products.permute(2, 0, 1).to(into.products[column].device)


@contextmanager
def _seen(modules: dict[str, nn.Linear], shape: torch.Size) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Input (detached) and output of each layer while its block runs inside, on hidden states of ``shape`` [batch, length]."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            # Experts see the tokens of all sequences one after another, MLA's latents are those of one head. What
            # else a layer is used for (DeBERTa's relative positions) is no token's, and left out.
            batch, length = shape
            if output.shape[:-1] not in ((batch, length), (batch * length,), (batch, 1, length)):
                return
            if name in seen:
                raise InputRefused(f"{name}: runs more than once in a block, which a scan does not support")
            seen[name] = (args[0].detach(), output)

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def layers_by_name(block: nn.Module, path: str, units: tuple[Unit, ...]) -> dict[str, nn.Linear]:
    """The modules of ``units`` in the block at ``path``, by layer name."""
    found: dict[str, nn.Linear] = {}
    for layer in (layer for unit in units for layer in unit.layers):
        module = block.get_submodule(layer.name.removeprefix(f"{path}."))
        assert isinstance(module, nn.Linear)
        found[layer.name] = module
    return found
