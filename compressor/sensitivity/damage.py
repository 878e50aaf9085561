"""From the products δ_t · e_t to damages and interactions.

The unbiased estimate, ½ E[(Σ_t δ_t · e_t)²] over sequences, sums over all pairs of tokens; nearly all of
those pairs are noise. Keeping only the pairs of a token with itself gives thousands of samples in place of dozens, at
the price of a bias: what an error at one position does to later ones in concert is left out. How much that is
depends mostly on a unit's kind (attention projections act in concert, others hardly). So the ratio of the two
estimates is shrunk towards the mean of its kind by as much as its scatter is sampling noise, and multiplies the second.
A few units differ from their kind by far more than noise (early attention projections): no ratio moves by more than half
a standard error, which keeps them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.sensitivity.probes import Column

_RANK = 128
_KEPT_ENERGY = 0.999


@dataclass(frozen=True)
class Damages:
    """Damage and its standard error by unit × format; ``factor`` [rank, columns] as in the scan's schema."""

    damage: dict[Column, float]
    stderr: dict[Column, float | None]
    columns: tuple[Column, ...] = ()
    factor: tuple[tuple[float, ...], ...] = ()


def from_products(products: Mapping[Column, Tensor], kinds: Mapping[str, str], tokens: int) -> Damages:
    """Damages in nats per token from ``products`` by column, each [draws, n, length], zero where nothing is
    scored. ``kinds`` maps unit names to kinds; ``tokens`` counts the scored positions."""
    columns = tuple(products)
    if not columns:
        return Damages({}, {})
    draws, n, _ = products[columns[0]].shape
    by_token = torch.stack([products[c].double().square().sum((0, 2)) for c in columns])  # [columns, n]
    by_sequence = torch.stack([products[c].double().sum(2).square().sum(0) for c in columns])
    scale = 0.5 / (draws * tokens)
    ratio = concert_ratio(
        by_token.sum(1), by_sequence.sum(1), [kinds[name] for name, _ in columns], n * draws
    )
    damage = scale * ratio * by_token.sum(1)
    stderr = scale * ratio * by_token.std(1) * n**0.5 if n > 1 else torch.full_like(damage, float("nan"))

    flat = torch.stack([products[c].flatten() for c in columns])
    moments = (flat @ flat.T).double() * scale * (ratio[:, None] * ratio[None, :]).sqrt()
    return Damages(
        {c: float(f"{d:.6g}") for c, d in zip(columns, damage.tolist(), strict=True)},
        {c: float(f"{e:.3g}") if n > 1 else None for c, e in zip(columns, stderr.tolist(), strict=True)},
        columns,
        low_rank(moments),
    )


def concert_ratio(by_token: Tensor, by_sequence: Tensor, kinds: list[str], samples: int) -> Tensor:
    """Ratio of the per-sequence to the per-token estimate for each column, shrunk, [columns].

    In logarithms, a column's ratio moves to the mean of its kind by the share of the kind's variance that
    sampling explains, but by at most half a standard error (the limited translation estimator of Efron and
    Morris 1972). A mean of ``samples`` squares of normal variables has the log variance 2 / samples.
    """
    ratio = torch.ones_like(by_token)
    for kind in dict.fromkeys(kinds):
        members = torch.tensor([i for i, k in enumerate(kinds) if k == kind])
        usable = members[(by_token[members] > 0) & (by_sequence[members] > 0)]
        if not len(usable):
            continue
        logs = (by_sequence[usable] / by_token[usable]).log()
        spread = float(logs.var()) if len(usable) > 1 else 0.0
        real = max(0.0, 1 - 2 / samples / spread) if spread > 0 else 0.0
        step = (1 - real) * (logs.mean() - logs)
        limit = 0.5 * (2 / samples) ** 0.5
        ratio[usable] = (logs + step.clamp(-limit, limit)).exp()
    return ratio


def low_rank(moments: Tensor) -> tuple[tuple[float, ...], ...]:
    """Rows F with FᵀF ≈ ``moments`` [columns, columns], as many as hold 99.9 % of the trace, at most 128."""
    values, vectors = torch.linalg.eigh(moments)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    share = values.cumsum(0) / values.sum().clamp(min=1e-300)
    rank = min(_RANK, int((share < _KEPT_ENERGY).sum()) + 1)
    rows = vectors[:, :rank].T * values[:rank, None].sqrt()
    # An eigenvector's sign is arbitrary: make its largest entry positive, so that files compare.
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    rows = rows * largest.sign()
    return tuple(tuple(float(f"{v:.5g}") for v in row) for row in rows.tolist())


def from_measurements(records: Mapping[int, dict[str, Any]], tokens: int) -> Damages:
    """Measured KL per token, with its standard error over sequences."""
    damage: dict[Column, float] = {}
    stderr: dict[Column, float | None] = {}
    for index in sorted(records):
        for entry in records[index]["candidates"]:
            name, fmt = entry["column"]
            kl = torch.tensor(entry["kl"], dtype=torch.float64)
            damage[name, fmt] = max(0.0, float(kl.sum()) / tokens)
            stderr[name, fmt] = float(kl.std() * len(kl) ** 0.5) / tokens if len(kl) > 1 else None
    return Damages(damage, stderr)


def from_output_errors(records: Mapping[int, dict[str, Any]]) -> Damages:
    """Relative squared output errors: the usual layer-wise score, without a unit in common with KL."""
    damage = {
        (e["column"][0], e["column"][1]): float(e["output_error"])
        for index in sorted(records)
        for e in records[index]["candidates"]
    }
    return Damages(damage, dict.fromkeys(damage))
