"""Stored tensors and config: against the definition of the packing, and against compressed-tensors itself."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_targets
from conftest import MakeLlama
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import make_plan

from compressor.checkpoint.compressed_tensors import (
    decode,
    encode,
    format_of_scheme,
    quantization_config,
    scale_dtype,
    scheme,
    storage_format,
    stored_tensors,
)
from compressor.formats import (
    QuantizedWeight,
    absmax_scale,
    parse_format,
    quantize,
    stored_bytes,
)
from compressor.graph import build_skeleton, discover
from compressor.sources.model import open_model
from compressor.sources.tensors import DTYPE_NAMES

FORMATS = [f"w{bits}{group}" for bits in range(2, 9) for group in ("", "g32", "g64", "g128")] + [
    "w8a8",
    "fp8",
]


@st.composite
def weights(draw: st.DrawFn) -> QuantizedWeight:
    fmt = parse_format(draw(st.sampled_from(FORMATS)))
    out_features = draw(st.integers(1, 9))
    in_features = draw(st.integers(1, 3)) * fmt.group_size if fmt.group_size else draw(st.integers(1, 75))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(out_features, in_features, generator=generator)
    scale = absmax_scale(weight, fmt, torch.bfloat16)
    codes = quantize(weight, scale, fmt)
    if fmt.kind == "int":  # all codes, not only those that rounding reaches
        codes = torch.randint(fmt.qmin, fmt.qmax + 1, codes.shape, generator=generator, dtype=torch.int8)
    return QuantizedWeight(codes, scale, fmt)


def pack(row: list[int], bits: int) -> list[int]:
    """The packing by its definition: one long number, the first code lowest, cut into 32-bit words."""
    number = sum((code + 2 ** (bits - 1)) << (i * bits) for i, code in enumerate(row))
    words = -(-len(row) * bits // 32)
    unsigned = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(words)]
    return [word - 2**32 if word >= 2**31 else word for word in unsigned]


@settings(max_examples=150, deadline=None)
@given(weights())
def test_stored_and_back(weight: QuantizedWeight) -> None:
    tensors = encode("a.b", weight, torch.bfloat16)
    back = decode("a.b", tensors | {"other.weight": torch.zeros(1)}, weight.format)
    assert torch.equal(back.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert torch.equal(back.scale, weight.scale)
    if "a.b.weight_packed" in tensors:
        expected = [pack(row, weight.format.bits) for row in weight.codes.tolist()]
        assert tensors["a.b.weight_packed"].tolist() == expected

    out_features, in_features = weight.codes.shape
    expected_tensors = stored_tensors(weight.format, out_features, in_features)
    assert {name.removeprefix("a.b."): tuple(t.shape) for name, t in tensors.items()} == {
        name: shape for name, (_, shape) in expected_tensors.items()
    }
    for name, (dtype, _) in expected_tensors.items():
        assert dtype is None or dtype == DTYPE_NAMES[tensors[f"a.b.{name}"].dtype]
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size == stored_bytes(weight.format, out_features, in_features, 4)


@settings(max_examples=100, deadline=None)
@given(weights())
def test_compressed_tensors_decompresses_to_the_same_weight(weight: QuantizedWeight) -> None:
    tensors = {n.removeprefix("a."): t for n, t in encode("a", weight, torch.bfloat16).items()}
    compressor = BaseCompressor.get_value_from_registry(storage_format(weight.format))
    described = QuantizationScheme(targets=["a"], **scheme(weight.format))
    theirs = compressor.decompress(tensors, described)["weight"]
    assert torch.equal(theirs, weight.dequantize(theirs.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_stored_exactly_or_refused(dtype: torch.dtype) -> None:
    fmt = parse_format("w4g32")
    weight = torch.randn(4, 64)
    stored = scale_dtype(dtype)
    scale = absmax_scale(weight, fmt, stored)
    tensors = encode("x", QuantizedWeight(quantize(weight, scale, fmt), scale, fmt), stored)
    assert tensors["x.weight_scale"].dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)
    inexact = scale * (1 + 2.0**-12)
    with pytest.raises(ValueError, match=r"x: .* not representable"):
        encode("x", QuantizedWeight(quantize(weight, inexact, fmt), inexact, fmt), stored)


@pytest.mark.parametrize("name", FORMATS)
def test_a_scheme_names_its_format(name: str) -> None:
    fmt = parse_format(name)
    assert format_of_scheme(scheme(fmt)) == fmt
    described = QuantizationScheme(targets=["x"], **scheme(fmt)).model_dump()
    assert format_of_scheme(described) == fmt


@pytest.mark.parametrize(
    "change",
    [
        {"symmetric": False},
        {"strategy": "tensor"},
        {"num_bits": 1},
        {"type": "float"},
        {"dynamic": True},
        {"strategy": "group", "group_size": 16},
    ],
)
def test_other_schemes_have_no_name(change: dict[str, Any]) -> None:
    described = scheme(parse_format("w4"))
    assert format_of_scheme({**described, "weights": {**described["weights"], **change}}) is None


@pytest.mark.parametrize("tied", [True, False])
def test_config_names_every_layer_once(make_llama: MakeLlama, tied: bool) -> None:
    skeleton = build_skeleton(open_model(str(make_llama(tie_word_embeddings=tied))))
    graph = discover(skeleton)
    plan = make_plan(skeleton, graph, "w4g64", {"qkv": "w8", "down": "w8a8", "o": "bf16"})
    config = quantization_config(plan, graph)

    QuantizationConfig.model_validate(config)
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {
        "pack-quantized",
        "int-quantized",
    }
    targets = [t for group in config["config_groups"].values() for t in group["targets"]]
    assert sorted(targets) == sorted(plan.quantized())
    assert len(set(targets)) == len(targets)
    assert set(config["ignore"]) == set(plan.kept())
    assert "lm_head" in config["ignore"]
    assert "model.layers.0.self_attn.o_proj" in config["ignore"]
    assert not set(targets) & set(config["ignore"])
    # As compressed-tensors resolves them, by its own rules of precedence:
    for name, assignment in plan.layers.items():
        module = skeleton.module.get_submodule(name)
        found = [
            t
            for g in config["config_groups"].values()
            for t in g["targets"]
            if match_targets(name, module, [t])
        ]
        groups = [g for g in config["config_groups"].values() if set(found) & set(g["targets"])]
        assert [format_of_scheme(g) for g in groups] == [
            f for f in [parse_format(assignment.format)] if f.quantized
        ]


def test_one_storage_is_not_called_mixed(make_llama: MakeLlama) -> None:
    skeleton = build_skeleton(open_model(str(make_llama())))
    graph = discover(skeleton)
    config = quantization_config(make_plan(skeleton, graph, "w4g64", {"down": "w8"}), graph)
    assert config["format"] == "pack-quantized"
    assert len(config["config_groups"]) == 2


def test_only_keys_of_the_oldest_supported_schema() -> None:
    """Schemas forbid unknown keys; these exist since compressed-tensors 0.17."""
    for name in FORMATS:
        described = scheme(parse_format(name))
        assert set(described) == {"weights", "input_activations", "output_activations", "format"}
        for arguments in (described["weights"], described["input_activations"]):
            assert arguments is None or set(arguments) == {
                "num_bits", "type", "symmetric", "strategy", "group_size", "dynamic",
            }  # fmt: skip
