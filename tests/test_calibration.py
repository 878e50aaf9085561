"""Streaming block by block gives what the whole model gives, however it is batched."""

from pathlib import Path

import pytest
import torch
from conftest import MakeLlama
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from compressor.calibration.block import calibrate_block
from compressor.calibration.gram import Gram
from compressor.calibration.stream import Stream, advance, open_stream, outputs
from compressor.formats import DENSE, Format, parse_format
from compressor.graph import ModelGraph, Skeleton, Unit, build_skeleton, discover, load, unload
from compressor.sources.model import open_model

CPU = torch.device("cpu")


def start(directory: Path, batch_bytes: int, padded: bool = False) -> tuple[Skeleton, ModelGraph, Stream]:
    skeleton = build_skeleton(open_model(str(directory)))
    graph = discover(skeleton)
    ids = torch.randint(3, 300, (6, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(6, 20, dtype=torch.bool)
    if padded:
        for row in range(6):
            mask[row, 20 - 2 * row :] = row == 0
    stream = open_stream(skeleton, graph, ids, mask, dtype=torch.float32, device=CPU, batch_bytes=batch_bytes)
    return skeleton, graph, stream


@pytest.mark.parametrize("batch_bytes", [1, 60_000, 2**30])
def test_streamed_logits_equal_the_model(tiny_llama_dir: Path, batch_bytes: int) -> None:
    skeleton, graph, stream = start(tiny_llama_dir, batch_bytes)
    for index, path in enumerate(graph.blocks):
        block = load(skeleton, path, dtype=torch.float32)
        advance(stream, block, index)
        unload(block)
        assert all(p.device.type == "meta" for p in skeleton.module.parameters())
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    with torch.inference_mode():
        expected = model(stream.input_ids).logits
    torch.testing.assert_close(outputs(skeleton, graph, stream, dtype=torch.float32), expected)


def collect(
    directory: Path, batch_bytes: int, padded: bool = False
) -> tuple[dict[str, torch.Tensor], list[str], Stream]:
    """Second moments of every unit when weights are halved as they are "rounded"."""
    skeleton, graph, stream = start(directory, batch_bytes, padded)
    seen: dict[str, torch.Tensor] = {}
    order: list[str] = []

    def halve(unit: Unit, hessian: torch.Tensor | None, tokens: int) -> dict[str, torch.Tensor]:
        assert hessian is not None
        assert tokens == stream.tokens
        seen[unit.name] = hessian
        order.append(unit.name)
        return {x.name: skeleton.module.get_submodule(x.name).weight * 0.5 for x in unit.layers}

    for index, path in enumerate(graph.blocks):
        block = load(skeleton, path, dtype=torch.float32)
        units = graph.units_of(index)
        formats: dict[str, Format] = {x.name: DENSE for u in units for x in u.layers}
        calibrate_block(stream, block, index, units, formats, halve)
        unload(block)
    return seen, order, stream


def test_second_moments_are_those_behind_the_rounded_prefix(tiny_llama_dir: Path) -> None:
    seen, order, stream = collect(tiny_llama_dir, 2**30)
    kinds = [name.rpartition(".")[2] for name in order]
    assert kinds == ["qkv", "o_proj", "gate_up", "down_proj"] * 2

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.startswith("model.layers") and isinstance(module, torch.nn.Linear):
            module.weight.data *= 0.5
            module.register_forward_pre_hook(
                lambda _, args, name=name: inputs.__setitem__(name, args[0].flatten(0, 1))
            )
    with torch.inference_mode():
        model.model(stream.input_ids)
    first = {"qkv": "q_proj", "gate_up": "gate_proj"}
    for unit, hessian in seen.items():
        parent, _, leaf = unit.rpartition(".")
        x = inputs[f"{parent}.{first.get(leaf, leaf)}"]
        torch.testing.assert_close(hessian, x.T @ x / len(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_replays_in_small_batches_give_the_same_moments(tiny_llama_dir: Path, padded: bool) -> None:
    whole, order, stream = collect(tiny_llama_dir, 2**30, padded)
    parts, order_parts, stream_parts = collect(tiny_llama_dir, 1, padded)
    assert len(stream.batches) == 1
    assert len(stream_parts.batches) == 6
    assert order == order_parts
    for name, hessian in whole.items():
        torch.testing.assert_close(parts[name], hessian, rtol=1e-4, atol=1e-5)
    real = stream.valid
    torch.testing.assert_close(stream_parts.hidden[real], stream.hidden[real], rtol=1e-4, atol=1e-5)


def test_quantized_activations_are_what_later_layers_and_moments_see(make_llama: MakeLlama) -> None:
    skeleton, graph, stream = start(make_llama(seed=3), 2**30)
    block = load(skeleton, graph.blocks[0], dtype=torch.float32)
    units = graph.units_of(0)
    formats = {x.name: parse_format("w8a8") for u in units for x in u.layers}
    keep = calibrate_block(
        stream,
        block,
        0,
        units,
        formats,
        lambda unit, h, n: {x.name: skeleton.module.get_submodule(x.name).weight for x in unit.layers},
    )
    assert keep is None
    other_skeleton, _, other = start(Path(skeleton.source.path), 2**30)
    again = load(other_skeleton, graph.blocks[0], dtype=torch.float32)
    advance(other, again, 0, {other_skeleton.module.get_submodule(n): f for n, f in formats.items()})
    assert torch.equal(stream.hidden, other.hidden)
    plain_skeleton, _, plain = start(Path(skeleton.source.path), 2**30)
    advance(plain, load(plain_skeleton, graph.blocks[0], dtype=torch.float32), 0)
    assert not torch.equal(stream.hidden, plain.hidden)


@given(tokens=st.integers(1, 50), width=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_gram_equals_the_product(tokens: int, width: int, seed: int) -> None:
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    gram = Gram(width, CPU)
    for part in x.split(7):
        gram.add(part)
    assert gram.tokens == tokens
    torch.testing.assert_close(gram.mean(), x.T @ x / tokens, rtol=1e-4, atol=1e-5)
    assert torch.equal(gram.mean(), gram.mean().T)
