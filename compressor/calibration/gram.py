"""Second moments of a layer's inputs: the Hessian of its output error."""

import torch
from torch import Tensor

_CHUNK = 8192  # tokens per product: long enough for full speed, short enough for fp32 sums to stay exact
_PANELS = 4


class Gram:
    """Accumulates Σ_t x_t x_tᵀ over tokens.

    For a linear layer the output error of a weight error ΔW is Σ_t |ΔW x_t|² = tr(ΔW (Σ x xᵀ) ΔWᵀ), so
    this matrix is (half) the Hessian of the layer-wise reconstruction loss (GPTQ, Frantar et al. 2022).
    Products are fp32 over chunks of 8192 tokens, added up in fp64.
    """

    def __init__(self, in_features: int, device: torch.device) -> None:
        self.tokens = 0
        self._sum = torch.zeros(in_features, in_features, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add tokens ``x`` [tokens, in_features], any floating dtype."""
        width = x.shape[1]
        panel = -(-width // _PANELS)
        for rows in x.split(_CHUNK):
            rows = rows.float()
            # Only the upper triangle of panels is computed: 5/8 of the work of the full product.
            for start in range(0, width, panel):
                part = rows[:, start : start + panel].T @ rows[:, start:]
                self._sum[start : start + panel, start:] += part
        self.tokens += x.shape[0]

    def mean(self) -> Tensor:
        """The mean over tokens, [in_features, in_features] fp32, symmetric."""
        upper = torch.triu(self._sum)
        full = upper + torch.triu(self._sum, diagonal=1).T
        return (full / max(self.tokens, 1)).float()
