"""Formats: names, grids, scales, round trips, and byte counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import UsageError
from compressor.formats import (
    DENSE,
    absmax_scale,
    dequantize,
    fake_quantize_activations,
    fitting,
    mse_scale,
    parse_format,
    quantize,
    stored_bytes,
)

INT_FORMATS = ["w2g32", "w3g32", "w4g32", "w4g64", "w4g128", "w4", "w8", "w8g128", "w8a8"]


def random_weight(
    seed: int, out_features: int = 6, in_features: int = 128, spread: float = 1.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out_features, in_features, generator=generator) * spread


@pytest.mark.parametrize("name", [*INT_FORMATS, "fp8", "bf16"])
def test_names_round_trip(name: str) -> None:
    assert parse_format(name).name == name
    assert parse_format(name.upper()) == parse_format(name)


def test_presets_are_understood() -> None:
    assert parse_format("W4A16").name == "w4g128"
    assert parse_format("FP8_DYNAMIC").name == "fp8"


@pytest.mark.parametrize("name", ["w4g48", "w9", "w1", "int4", "", "w4g", "w4a8"])
def test_unknown_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match="unknown format"):
        parse_format(name)


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("w4g128", 256, "w4g128"),
        ("w4g128", 192, "w4g64"),
        ("w4g128", 96, "w4g32"),
        ("w4g128", 100, None),
        ("w8", 7, "w8"),
    ],
)
def test_group_size_falls_back_to_one_that_divides(name: str, inputs: int, expected: str | None) -> None:
    found = fitting(parse_format(name), inputs)
    assert (found.name if found else None) == expected


@pytest.mark.parametrize("name", [*INT_FORMATS, "fp8"])
@given(seed=st.integers(0, 10_000), exponent=st.integers(-12, 6))
@settings(max_examples=20, deadline=None)
def test_values_on_the_grid_survive_unchanged(name: str, seed: int, exponent: int) -> None:
    fmt = parse_format(name)
    weight = random_weight(seed, spread=2.0**exponent)
    scale = absmax_scale(weight, fmt, torch.bfloat16)
    once = dequantize(quantize(weight, scale, fmt), scale, fmt, torch.float32)
    again = dequantize(quantize(once, scale, fmt), scale, fmt, torch.float32)
    assert torch.equal(once, again)


@pytest.mark.parametrize("name", INT_FORMATS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_nearest_code_is_the_brute_force_nearest(name: str, seed: int) -> None:
    fmt = parse_format(name)
    weight = random_weight(seed, out_features=2)
    scale = absmax_scale(weight, fmt)
    got = dequantize(quantize(weight, scale, fmt), scale, fmt, torch.float32)
    codes = torch.arange(fmt.qmin, fmt.qmax + 1)
    per_weight = scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
    best = (codes * per_weight[..., None] - weight[..., None]).abs().amin(-1)
    torch.testing.assert_close((got - weight).abs(), best, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["w2g32", "w3g32", "w4g32", "w4", "w8"])
@given(seed=st.integers(0, 10_000), weighted=st.booleans())
@settings(max_examples=20, deadline=None)
def test_searched_scale_is_never_worse_than_absmax(name: str, seed: int, weighted: bool) -> None:
    fmt = parse_format(name)
    weight = random_weight(seed) ** 3  # heavy tails
    importance = (
        torch.rand(128, generator=torch.Generator().manual_seed(seed)) if weighted else torch.ones(128)
    )

    def cost(scale: torch.Tensor) -> float:
        error = dequantize(quantize(weight, scale, fmt), scale, fmt, torch.float32) - weight
        return float((error.square() * importance).sum())

    searched = mse_scale(weight, fmt, importance if weighted else None, torch.bfloat16)
    assert cost(searched) <= cost(absmax_scale(weight, fmt, torch.bfloat16)) * (1 + 1e-5)


def test_search_does_not_depend_on_which_rows_are_searched_together() -> None:
    fmt = parse_format("w4g32")
    weight = random_weight(0, out_features=1500)
    parts = torch.cat([mse_scale(part, fmt) for part in weight.split(7)])
    assert torch.equal(mse_scale(weight, fmt), parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*INT_FORMATS, "fp8"])
def test_scales_are_positive_finite_and_exact_in_their_dtype(name: str, dtype: torch.dtype) -> None:
    fmt = parse_format(name)
    weight = random_weight(1)
    weight[0] = 0.0
    weight[1] = 1e-30
    weight[2] *= 1e4
    for scale in (absmax_scale(weight, fmt, dtype), mse_scale(weight, fmt, None, dtype)):
        assert torch.equal(scale.to(dtype).float(), scale)
        assert bool((scale > 0).all())
        assert bool(torch.isfinite(scale).all())
        restored = dequantize(quantize(weight, scale, fmt), scale, fmt, torch.float32)
        assert bool(torch.isfinite(restored).all())
        assert not restored[0].any()


def test_activations_are_quantized_per_token() -> None:
    x = torch.randn(2, 3, 64)
    x[0, 0] *= 100
    for name, tolerance in (("w8a8", 1 / 127), ("fp8", 1 / 16)):
        seen = fake_quantize_activations(x, parse_format(name))
        limit = x.abs().amax(-1, keepdim=True) * tolerance
        assert bool(((seen - x).abs() <= limit).all())
        alone = fake_quantize_activations(x[1, 2], parse_format(name))
        assert torch.equal(alone, seen[1, 2])  # no token sees another
    assert fake_quantize_activations(x, parse_format("w4g32")) is x


def test_activation_quantization_equals_compressed_tensors() -> None:
    """The same numbers that transformers computes after a reload."""
    from compressed_tensors.quantization import QuantizationStatus, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    x = torch.randn(4, 5, 64)
    for name, preset in (("w8a8", "W8A8"), ("fp8", "FP8_DYNAMIC")):
        scheme = preset_name_to_scheme(preset, ["Linear"])
        module = torch.nn.Linear(64, 64)
        module.quantization_scheme = scheme
        module.quantization_status = QuantizationStatus.FROZEN
        expected = forward_quantize(module, x, "input", scheme.input_activations)
        torch.testing.assert_close(
            fake_quantize_activations(x, parse_format(name)), expected, rtol=0, atol=1e-6
        )


def test_bytes_count_codes_scales_and_shape() -> None:
    assert stored_bytes(parse_format("w4g32"), 8, 64, 4) == 8 * 64 // 2 + 8 * 2 * 2 + 16
    assert stored_bytes(parse_format("w3g32"), 8, 64, 4) == 8 * (64 * 3 // 32) * 4 + 8 * 2 * 2 + 16
    assert stored_bytes(parse_format("w8a8"), 8, 64, 4) == 8 * 64 + 8 * 2
    assert stored_bytes(DENSE, 8, 64, 2) == 8 * 64 * 2
