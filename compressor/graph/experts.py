"""Experts of a mixture as the linear layers that the checkpoint stores.

transformers 5 holds the experts of a layer as two 3-D parameters, ``gate_up_proj`` [experts, 2 · inner, hidden] and
``down_proj`` [experts, hidden, inner], and merges into them what a checkpoint stores expert by expert. Engines and
quantized checkpoints know the stored form, so the skeleton goes back to it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StoredExperts:
    """The stored names of one stack's layers, without ``.weight``, each by expert; ``gate`` is empty for experts
    without a gate."""

    gate: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]


class Experts(nn.Module):
    """Computes what the ``stack`` computes, with one linear layer for each of its matrices.

    Expert e's layers are submodules of the child ``e``, named as they are stored. While :func:`all_tokens_seen` is
    in force every layer sees every token, and tokens that the router sent elsewhere do not count in the output.
    ``chosen`` [experts] counts the tokens that the router has sent to each expert under it.
    """

    def __init__(self, stack: nn.Module, names: StoredExperts) -> None:
        super().__init__()
        _, hidden, inner = stack.get_parameter("down_proj").shape
        self.number = len(names.down)
        self.all_tokens = False
        self.chosen = torch.zeros(self.number, dtype=torch.int64)
        # The stack itself stays out of the module tree, and without its weights: it is asked for its gate only.
        for name in list(stack._parameters):
            stack._parameters[name] = None
        self._stack = [stack]
        self._leaves = [
            name[0].rpartition(".")[2] if name else "" for name in (names.gate, names.up, names.down)
        ]
        for expert in range(self.number):
            child = nn.Module()
            for leaf, (out_features, in_features) in zip(
                self._leaves, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
            ):
                if leaf:
                    child.add_module(leaf, nn.Linear(in_features, out_features, bias=False, device="meta"))
            self.add_module(str(expert), child)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Like the stack's own: [tokens, hidden] with the chosen experts and their weights, each [tokens, k]."""
        result = torch.zeros_like(hidden_states)
        for expert in range(self.number):
            token, rank = torch.where(top_k_index == expert)
            if self.all_tokens:
                self.chosen[expert] += len(token)
            elif not len(token):
                continue
            output = self._expert(expert, hidden_states if self.all_tokens else hidden_states[token])
            if self.all_tokens:
                output = output[token]
            result.index_add_(0, token, (output * top_k_weights[token, rank, None]).to(result.dtype))
        return result

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        layers = self.get_submodule(str(expert))._modules
        stack: Any = self._stack[0]
        gate, up, down = (layers.get(leaf) for leaf in self._leaves)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        if gate is None:
            return down(stack.act_fn(up(x)))
        return down(stack._apply_gate(torch.cat([gate(x), up(x)], dim=-1)))


def can_unfuse(stack: nn.Module) -> bool:
    """Whether :class:`Experts` computes what this module of transformers computes."""
    return (
        not getattr(stack, "is_transposed", True)
        and getattr(stack, "is_concatenated", False)
        and not getattr(stack, "has_bias", True)
        and not getattr(stack, "has_post_expert_norm", False)
        and hasattr(stack, "_apply_gate")
    )


def is_stack(module: nn.Module) -> bool:
    """Whether a module holds experts as 3-D parameters."""
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3


@contextmanager
def all_tokens_seen(module: nn.Module) -> Iterator[Sequence[tuple[str, Experts]]]:
    """Inside, every expert below ``module`` sees every token; gives the expert stacks by their paths in it.

    What the module computes stays the same, so statistics of rarely chosen experts are as good as those of others.
    """
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, Experts)]
    for _, experts in found:
        experts.all_tokens = True
        experts.chosen.zero_()
    try:
        yield found
    finally:
        for _, experts in found:
            experts.all_tokens = False
