"""What engines load: the rows that users rely on, and that every offer is one that the engine accepts."""

import pytest

from compressor.engines import ENGINES, check, loadable_formats
from compressor.engines.check import DYNAMIC_INT8, FP8, INT4, INT8, ODD_BITS
from compressor.formats import parse_format
from compressor.graph import Linear

ALL = INT4 | INT8 | ODD_BITS | DYNAMIC_INT8 | FP8


def layer(inputs: int = 256, outputs: int = 256) -> Linear:
    return Linear("model.layers.0.mlp.up_proj", outputs, inputs, False)


def problems(engine: str, name: str, inputs: int = 256, outputs: int = 256, **options: int) -> list[str]:
    found = check(engine, [layer(inputs, outputs)], parse_format(name), **options)
    return [f"{problem.reason} -> {problem.nearest}" for problem in found]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_format_is_judged(engine: str) -> None:
    """Loaded or refused, never forgotten; and no format is in two rows."""
    for name in ALL:
        listed = [row for row in ENGINES[engine].rows if name in row.formats]
        refused = [refusal for refusal in ENGINES[engine].refusals if name in refusal.formats]
        assert len(listed) + len(refused) == 1, name
        assert bool(problems(engine, name)) == bool(refused)
    assert not problems(engine, "bf16", 3, 5)
    assert loadable_formats(engine) == sorted(name for name in ALL if not problems(engine, name))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_offered_instead_loads(engine: str) -> None:
    for name in ALL:
        fmt = parse_format(name)
        for problem in check(engine, [layer()], fmt):
            assert problem.nearest is not None
            nearest = parse_format(problem.nearest)
            assert not check(engine, [layer()], nearest)
            assert nearest.group_size in (fmt.group_size, None)


def test_vllm_on_a_processor() -> None:
    assert problems("vllm-cpu", "w8") == [
        "8-bit weights without 8-bit activations have no CPU kernel -> w8a8"
    ]
    assert problems("vllm-cpu", "w3g64") == ["only 4 and 8 bits have a CPU kernel -> w4g64"]
    assert not problems("vllm-cpu", "w4g32", 96, 160)
    assert problems("vllm-cpu", "w4g32", 96, 100) == ["100 outputs, and 32 must divide them -> None"]
    assert problems("vllm-cpu", "w4", 48, 32) == ["48 inputs, and 32 must divide them -> None"]
    assert not problems("vllm-cpu", "w8a8", 33, 7)


def test_vllm_on_a_gpu() -> None:
    assert not problems("vllm-cuda", "w4g128", capability=75)
    assert not problems("vllm-cuda", "w8", 100, 36)
    assert problems("vllm-cuda", "w4g128", capability=70) == [
        "w4g128 needs compute capability at least 7.5, and the GPU has 7.0 -> None"
    ]
    assert problems("vllm-cuda", "w2g32")[0].endswith("-> w4g32")
    assert not problems("vllm-cuda-humming", "w2g32")
    assert not problems("vllm-cuda", "w8a8", capability=90)
    assert problems("vllm-cuda", "w8a8", capability=120) == [
        "w8a8 needs compute capability below 10.0, and the GPU has 12.0 -> fp8"
    ]


def test_group_sizes_have_to_divide() -> None:
    for engine in ENGINES:
        assert problems(engine, "w4g128", 192) == ["w4g128 does not divide its 192 inputs -> None"]


def test_each_layer_is_named() -> None:
    layers = [layer(), Linear("odd", 30, 256, False), Linear("odder", 31, 256, False)]
    assert [p.layer for p in check("vllm-cpu", layers, parse_format("w4g32"))] == ["odd", "odder"]


def test_experts_on_a_processor_have_int4_in_groups() -> None:
    expert = Linear("model.layers.0.mlp.experts.0.up_proj", 256, 256, False, form="expert")
    assert not check("vllm-cpu", [expert], parse_format("w4g32"))
    for name in ("w4", "fp8"):
        (problem,) = check("vllm-cpu", [expert], parse_format(name))
        assert "processors with AMX" in problem.reason
