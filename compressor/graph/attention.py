"""Attention layers that cache keys and values, and what enters their caches.

Every such layer calls ``cache.update(keys, values, …)`` with what it is going to attend to: keys after the rotary
embedding, [batch, heads, length, head size], however its projections are fused. Standing before that call sees, and
may change, exactly what an engine would store.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# What transformers calls the argument, by version and architecture.
_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")

# (name of the layer, keys, values) -> keys and values to go on with
Entering = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]


def attention_layers(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The attention layers of ``model`` by their paths (behind ``prefix``), in the order of the modules."""
    found = {
        f"{prefix}.{path}" if prefix and path else prefix + path: module
        for path, module in model.named_modules()
        if "attention" in type(module).__name__.lower() and _argument(module) is not None
    }
    # BERT's attention holds another that does the work.
    return {n: m for n, m in found.items() if not any(other.startswith(f"{n}.") for other in found)}


def latent(layer: nn.Module) -> bool:
    """Whether the layer caches a latent that keys and values are made from later (MLA)."""
    return any(name.startswith(("kv_a_proj", "kv_b_proj")) for name, _ in layer.named_children())


def shared_from(layers: Mapping[str, nn.Module], name: str) -> str | None:
    """The layer whose cache ``name`` reads in place of one of its own (Gemma 3n and 4); None if it has its own."""
    wanted = layers[name]
    if not getattr(wanted, "is_kv_shared_layer", False):
        return None
    storing = None
    for other, layer in layers.items():
        if other == name:
            break
        if getattr(layer, "store_full_length_kv", False) and _type(layer) == _type(wanted):
            storing = other
    return storing


def intercept(layers: Mapping[str, nn.Module], entering: Entering) -> Callable[[], None]:
    """Have ``entering`` see, and replace, what enters the caches of ``layers``, whether a cache is in use or not.

    Returns a function that ends it.
    """
    handles = [
        layer.register_forward_pre_hook(_substitute(name, layer, entering), with_kwargs=True)
        for name, layer in layers.items()
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


@contextmanager
def intercepted(layers: Mapping[str, nn.Module], entering: Entering) -> Iterator[None]:
    """:func:`intercept` for as long as the context lasts."""
    end = intercept(layers, entering)
    try:
        yield
    finally:
        end()


class _Entrance:
    """Stands before the cache of one layer; without a cache, it passes on what would have entered."""

    def __init__(self, cache: Any, entering: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._cache, self._entering = cache, entering

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._entering(keys, values)
        return (keys, values) if self._cache is None else self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _substitute(name: str, layer: nn.Module, entering: Entering) -> Callable[..., tuple[Any, Any]]:
    argument = _argument(layer)
    assert argument is not None
    position = list(inspect.signature(layer.forward).parameters).index(argument)

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def enter(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return entering(name, keys, values)

        if position < len(args):
            args = (*args[:position], _Entrance(args[position], enter), *args[position + 1 :])
            return args, kwargs
        given = next((key for key in _NAMES if key in kwargs), argument)
        return args, {**kwargs, given: _Entrance(kwargs.get(given), enter)}

    return before


def _argument(layer: nn.Module) -> str | None:
    parameters = inspect.signature(layer.forward).parameters
    return next((name for name in _NAMES if name in parameters), None)


def _type(layer: nn.Module) -> Any:
    return getattr(layer, "layer_type", None)
