"""The range of keys and values, and from it the scales of a quantized cache.

A scale is max |x| / 448 over all calibration tokens, one for the keys and one for the values of a layer: the largest
of them lands on the end of the E4M3 grid, as vLLM stores them (x / scale, rounded). Padding does not count. Where all
are zero the scale is 2⁻²⁴.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compressor.calibration.stream import Stream
from compressor.errors import InputRefused
from compressor.formats import kv_scale
from compressor.graph.attention import intercepted


class KeyValueRange:
    """Largest magnitudes of what enters the caches of ``layers`` while ``recorded``."""

    def __init__(self, stream: Stream, layers: Mapping[str, nn.Module]) -> None:
        self._stream, self._layers = stream, layers
        self._largest: dict[str, Tensor] = {}  # [2]: of keys, of values
        self._passes: dict[str, int] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Measure one pass of all batches, in their order; what an earlier pass found is forgotten."""
        self._largest, self._passes = {}, dict.fromkeys(self._layers, 0)
        with intercepted(self._layers, self._note):
            yield

    def scales(self) -> dict[str, tuple[float, float]]:
        """(scale of keys, scale of values) of each layer that wrote to a cache.

        Raises InputRefused when a key or value is not finite.
        """
        found = {}
        for name, largest in self._largest.items():
            if not bool(torch.isfinite(largest).all()):
                raise InputRefused(f"{name}: its keys or values are not finite, so they have no scale")
            keys, values = kv_scale(largest).tolist()
            found[name] = (keys, values)
        return found

    def _note(self, name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stream = self._stream
        valid = stream.valid[stream.batches[self._passes[name]]].to(keys.device)
        self._passes[name] += 1
        # [batch, heads, length, head size] -> the values of each token that is not padding
        here = torch.stack([states.transpose(1, 2)[valid].abs().amax().float() for states in (keys, values)])
        self._largest[name] = torch.maximum(self._largest.get(name, here), here)
        return keys, values
