"""GPTQ: round columns one after another, each time correcting the columns still to come.

Frantar et al. 2022 (arXiv 2210.17323), with a static column order by input energy, scales searched for
the squared error weighted by that energy and fixed beforehand, and blocked updates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.formats import Format, QuantizedWeight, mse_scale

_BLOCK = 128


@dataclass(frozen=True)
class Factor:
    """What rounding needs of a Hessian, shared by the layers that share an input.

    ``upper`` [in, in] is U with H⁻¹ = UᵀU for the permuted, damped Hessian; ``order`` [in] is the
    column order, ``energy`` [in] the Hessian's diagonal in the original order, ``damping`` what was
    added to the diagonal relative to its mean.
    """

    upper: Tensor
    order: Tensor
    energy: Tensor
    damping: float


def factorize(hessian: Tensor, damping: float = 0.01) -> Factor | None:
    """Factor a layer's input second moment [in, in] (fp32); None when it holds no information.

    The damping starts at ``damping`` times the mean diagonal and grows tenfold until the Cholesky
    factorization succeeds. Dead inputs (zero energy) get the mean energy, so that their weights are
    rounded as they are, uncoupled from the others.
    """
    energy = hessian.diagonal().clone()
    if not bool(torch.isfinite(hessian).all()) or not bool((energy > 0).any()):
        return None
    alive = energy > 0
    mean = energy[alive].mean()
    order = torch.argsort(energy, descending=True, stable=True)
    permuted = hessian[order][:, order]
    dead = ~alive[order]
    diagonal = permuted.diagonal()
    diagonal[dead] = mean
    while damping <= 1.0:
        damped = permuted.clone()
        damped.diagonal().add_(damping * mean)
        # H = PLLᵀP with the reversed order P gives H⁻¹ = (PL⁻¹P)ᵀ(PL⁻¹P), and PL⁻¹P is upper triangular:
        # one factorization and one triangular inverse instead of inverse and second factorization.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not int(failed):
            identity = torch.eye(len(order), dtype=lower.dtype, device=lower.device)
            upper = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1).contiguous()
            if bool(torch.isfinite(upper).all()):
                return Factor(upper, order, energy, damping)
        damping *= 10
    return None


def gptq(
    weight: Tensor, factor: Factor, fmt: Format, *, scale_dtype: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    """Round ``weight`` [out, in] given its input's Hessian factor. Integer formats only."""
    weight = weight.float()
    scale = mse_scale(weight, fmt, factor.energy, scale_dtype)
    order = factor.order
    in_features = weight.shape[1]
    group_of = torch.arange(in_features, device=weight.device) // (fmt.group_size or in_features)

    # Inputs first, so that every step below touches contiguous rows.
    rest = weight.T[order].contiguous()
    step = scale.T[group_of[order]].contiguous()
    codes = torch.empty_like(rest)
    for start in range(0, in_features, _BLOCK):
        end = min(start + _BLOCK, in_features)
        rows = rest[start:end]
        errors = torch.empty_like(rows)
        corner = factor.upper[start:end, start:end]
        pivots = corner.diagonal()
        for i in range(end - start):
            row, s = rows[i], step[start + i]
            code = (row / s).round_().clamp_(fmt.qmin, fmt.qmax)
            codes[start + i] = code
            error = torch.addcmul(row, code, s, value=-1).div_(pivots[i])
            errors[i] = error
            rows[i + 1 :].addr_(corner[i, i + 1 :], error, alpha=-1)
        rest[end:].addmm_(factor.upper[start:end, end:].T, errors, alpha=-1)
    original = torch.empty_like(codes)
    original[order] = codes
    return QuantizedWeight(original.T.contiguous().to(fmt.code_dtype), scale, fmt)


def relative_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """Share of the layer's output energy that rounding destroys: tr(ΔW H ΔWᵀ) / tr(W H Wᵀ)."""
    weight = weight.float()
    delta = weight - rounded.float()
    lost = ((delta @ hessian) * delta).sum()
    total = ((weight @ hessian) * weight).sum()
    return float(lost / total) if float(total) > 0 else 0.0
