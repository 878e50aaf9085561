"""GPTQ and round-to-nearest against definitions, and on the inputs that break other tools."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.formats import dequantize, mse_scale, parse_format
from compressor.rounding.gptq import factorize, gptq, relative_error
from compressor.rounding.unit import round_unit


def problem(
    seed: int, out_features: int = 12, in_features: int = 96, tokens: int = 400
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(in_features, in_features, generator=generator) / in_features**0.5
    x = torch.randn(tokens, in_features, generator=generator) @ mixing
    x = x * torch.rand(in_features, generator=generator).exp()
    return torch.randn(out_features, in_features, generator=generator), x.T @ x / tokens


def by_the_book(
    weight: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, name: str, damping: float
) -> torch.Tensor:
    """GPTQ as defined: after each column, the remaining columns are re-solved with the exact inverse."""
    fmt = parse_format(name)
    energy = hessian.diagonal()
    order = torch.argsort(energy, descending=True, stable=True)
    w = weight.double()[:, order]
    h = hessian.double()[order][:, order] + damping * energy.double().mean() * torch.eye(
        len(order), dtype=torch.float64
    )
    step = scale.double().repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)[:, order]
    rounded = torch.zeros_like(w)
    for i in range(len(order)):
        inverse = torch.linalg.inv(h[i:, i:])
        rounded[:, i] = (w[:, i] / step[:, i]).round().clamp(fmt.qmin, fmt.qmax) * step[:, i]
        error = (w[:, i] - rounded[:, i]) / inverse[0, 0]
        w[:, i:] -= error[:, None] * inverse[0]
    result = torch.empty_like(rounded)
    result[:, order] = rounded
    return result.float()


@pytest.mark.parametrize("name", ["w3g32", "w4g32", "w4", "w8"])
def test_gptq_equals_its_definition(name: str) -> None:
    weight, hessian = problem(0)
    fmt = parse_format(name)
    factor = factorize(hessian)
    assert factor is not None
    result = gptq(weight, factor, fmt, scale_dtype=torch.bfloat16)
    expected = by_the_book(weight, hessian, result.scale, name, factor.damping)
    got = result.dequantize(torch.float32)
    # A value that falls on a rounding boundary may go either way; nothing else may differ.
    assert (got != expected).float().mean() < 0.01
    assert relative_error(weight, got, hessian) == pytest.approx(
        relative_error(weight, expected, hessian), rel=0.02
    )


@given(seed=st.integers(0, 10_000), name=st.sampled_from(["w2g32", "w3g32", "w4g32", "w4", "w8a8"]))
@settings(max_examples=25, deadline=None)
def test_gptq_is_better_than_nearest_on_correlated_inputs(seed: int, name: str) -> None:
    weight, hessian = problem(seed)
    (layer,) = round_unit(
        [weight],
        parse_format(name),
        hessian,
        method="gptq",
        scales="mse",
        damping=0.01,
        scale_dtype=torch.bfloat16,
    )
    assert layer.error is not None
    assert layer.error_rtn is not None
    assert layer.error <= layer.error_rtn


def test_factor_gives_the_inverse_hessian() -> None:
    _, hessian = problem(3)
    factor = factorize(hessian)
    assert factor is not None
    damped = hessian + factor.damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.inv(damped.double())[factor.order][:, factor.order]
    torch.testing.assert_close((factor.upper.T @ factor.upper).double(), inverse, rtol=1e-3, atol=1e-3)
    assert torch.equal(factor.upper, factor.upper.triu())


def test_siblings_rounded_together_equal_siblings_rounded_alone() -> None:
    weight, hessian = problem(4, out_features=20)
    settings_ = {"method": "gptq", "scales": "mse", "damping": 0.01, "scale_dtype": torch.bfloat16}
    fmt = parse_format("w4g32")
    together = round_unit([weight[:12], weight[12:]], fmt, hessian, **settings_)
    alone = round_unit([weight[:12]], fmt, hessian, **settings_)
    same = together[0].weight.codes == alone[0].weight.codes
    assert same.float().mean() > 0.99
    assert torch.equal(together[0].weight.scale, alone[0].weight.scale)


def round_one(weight: torch.Tensor, hessian: torch.Tensor | None, name: str = "w4g32"):
    (layer,) = round_unit(
        [weight],
        parse_format(name),
        hessian,
        method="gptq",
        scales="mse",
        damping=0.01,
        scale_dtype=torch.bfloat16,
    )
    assert bool(torch.isfinite(layer.weight.dequantize(torch.float32)).all())
    assert bool((layer.weight.scale > 0).all())
    return layer


def test_dead_inputs_are_rounded_as_they_are() -> None:
    weight, hessian = problem(5)
    hessian[7] = 0
    hessian[:, 7] = 0
    layer = round_one(weight, hessian)
    fmt = parse_format("w4g32")
    scale = mse_scale(weight, fmt, hessian.diagonal(), torch.bfloat16)
    nearest = (weight[:, 7] / scale[:, 0]).round().clamp(-8, 7)
    assert torch.equal(layer.weight.codes[:, 7].float(), nearest)
    assert layer.method == "gptq"
    assert layer.weight.codes[:, 7].any()  # not zeroed


@pytest.mark.parametrize("hessian", [None, torch.zeros(96, 96), torch.full((96, 96), float("nan"))])
def test_no_information_falls_back_to_nearest_and_says_so(hessian: torch.Tensor | None) -> None:
    weight, _ = problem(6)
    layer = round_one(weight, hessian)
    assert layer.method == "rtn"
    assert "rounded to nearest" in (layer.note or "")


def test_constant_inputs_one_token_and_outliers_stay_finite() -> None:
    weight, _ = problem(7)
    constant = torch.ones(96, 96)
    round_one(weight, constant)
    token = torch.randn(1, 96)
    round_one(weight, token.T @ token)
    weight[3, 5] *= 1000
    weight[4] = 0
    x = torch.randn(50, 96)
    x[:, 11] *= 1000
    for name in ("w4g32", "w4", "w8", "w8a8", "fp8"):
        layer = round_one(weight.bfloat16().float(), x.T @ x / 50, name)
        assert not layer.weight.dequantize(torch.float32)[4].any()


def test_in_features_that_no_block_divides() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(600, 176, generator=generator)
    weight = torch.randn(9, 176, generator=generator)
    layer = round_one(weight, x.T @ x / 600, "w4")
    restored = dequantize(layer.weight.codes, layer.weight.scale, layer.weight.format, torch.float32)
    assert restored.shape == weight.shape
