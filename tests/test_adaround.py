"""Learned rounding: the parametrization, block reconstruction, and ``--method adaround`` as a user runs it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import MakeLlama
from torch import Tensor, nn

from compressor.calibration.stream import BlockCall, Stream
from compressor.formats import absmax_scale, parse_format, quantize
from compressor.formats.quantize import QuantizedWeight, grouped
from compressor.rounding.learned import LearnedWeight
from compressor.rounding.reconstruct import Reconstruction, ReconstructSettings, reconstruct_block


def rounded(weight: Tensor, name: str) -> QuantizedWeight:
    fmt = parse_format(name)
    scale = absmax_scale(weight, fmt, torch.bfloat16)
    return QuantizedWeight(quantize(weight, scale, fmt), scale, fmt)


@pytest.mark.parametrize("name", ["w2g32", "w3g32", "w4g64", "w4", "w8"])
def test_it_starts_as_the_codes_it_is_made_from_even_far_from_the_weight(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 128)
    start = rounded(weight, name)
    # codes moved away from the nearest ones, as GPTQ moves them
    codes = (start.codes + torch.randint(-1, 2, start.codes.shape)).clamp(
        start.format.qmin, start.format.qmax
    )
    start = QuantizedWeight(codes.to(torch.int8), start.scale, start.format)
    learned = LearnedWeight(start, weight, torch.bfloat16)
    assert torch.equal(learned().detach(), start.dequantize(torch.float32))
    made = learned.quantized()
    assert torch.equal(made.codes, start.codes)
    assert torch.equal(made.scale, start.scale)


def test_its_gradient_is_straight_through_and_that_of_lsq() -> None:
    torch.manual_seed(0)
    weight, upstream = torch.randn(4, 64), torch.randn(4, 64)
    learned = LearnedWeight(rounded(weight, "w3g32"), weight, torch.bfloat16)
    learned().backward(upstream)
    start = rounded(weight, "w3g32")
    scale = start.scale[..., None]
    at = grouped(upstream, start.format)
    assert learned.values.grad is not None
    assert learned.factor.grad is not None
    leaves = (learned.values >= 3) & (at < 0) | (learned.values <= -4) & (
        at > 0
    )  # a step that way would leave the grid
    assert leaves.any()
    torch.testing.assert_close(learned.values.grad, (at * scale).masked_fill(leaves, 0))
    expected = (at * grouped(start.codes.float(), start.format)).sum(-1) * start.scale
    torch.testing.assert_close(learned.factor.grad, expected)


class Block(nn.Module):
    """Two layers and a residual, as far as a reconstruction looks into a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stream_for(sequences: int, length: int, valid: Tensor | None = None) -> Stream:
    valid = torch.ones(sequences, length, dtype=torch.bool) if valid is None else valid
    batches = [slice(i, min(i + 4, sequences)) for i in range(0, sequences, 4)]
    calls = [[BlockCall((), {})] for _ in batches]
    ids = torch.zeros(sequences, length, dtype=torch.long)
    return Stream(ids, torch.zeros(sequences, length, 1), valid, batches, calls, torch.device("cpu"))


def run_reconstruction(
    inputs: Tensor, name: str = "w3g32", valid: Tensor | None = None, **changes: float
) -> tuple[Block, Reconstruction]:
    torch.manual_seed(0)
    block = Block(inputs.shape[-1]).requires_grad_(False)
    with torch.no_grad():
        targets = block(inputs)
    layers = {
        path: LearnedWeight(rounded(module.weight, name), module.weight, torch.bfloat16)
        for path, module in (("up", block.up), ("down", block.down))
    }
    settings = ReconstructSettings(**{"iterations": 60, **changes})  # type: ignore[arg-type]
    stream = stream_for(inputs.shape[0], inputs.shape[1], valid)
    return block, reconstruct_block(block, 0, stream, inputs, targets, layers, {}, settings, seed=0)


def test_held_out_error_falls_and_is_what_the_returned_weights_give() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(32, 16, 64) @ (torch.randn(64, 64) / 8)
    block, found = run_reconstruction(inputs)
    assert found.held_out == 1
    assert found.after < 0.8 * found.before
    with torch.no_grad():
        wanted = block(inputs)[28:]
        for path, weight in found.weights.items():
            block.get_submodule(path).weight.copy_(weight.dequantize(torch.float32))
        errors = (block(inputs)[28:] - wanted).square().sum(-1) / wanted.square().sum(-1)
    assert float(errors.mean()) == pytest.approx(found.after, rel=1e-4)


def test_what_does_not_help_is_not_kept() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(32, 8, 64)
    _, found = run_reconstruction(inputs, value_rate=1.0, scale_rate=0.1, iterations=10)
    assert found.after == found.before


def test_padding_takes_no_part() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(16, 8, 64)
    valid = torch.ones(16, 8, dtype=torch.bool)
    valid[:, 6:] = False
    other = inputs.clone()
    other[:, 6:] = 100 * torch.randn(16, 2, 64)
    first, second = (run_reconstruction(x, valid=valid, iterations=8)[1] for x in (inputs, other))
    for path in ("up", "down"):
        assert torch.equal(first.weights[path].codes, second.weights[path].codes)


@pytest.mark.parametrize("case", ["dead input", "constant", "zero rows", "outliers"])
def test_degenerate_blocks_stay_finite(case: str) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(8, 4, 96)  # 96 is no multiple of 64 or 128
    if case == "dead input":
        inputs[..., :7] = 0
    if case == "constant":
        inputs[:] = 1
    if case == "outliers":
        inputs[..., 3] *= 1000
    if case == "zero rows":
        inputs[:] = 0
    _, found = run_reconstruction(inputs, iterations=10)
    assert found.after <= found.before
    for weight in found.weights.values():
        assert weight.dequantize(torch.float32).isfinite().all()


def compressor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compressor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_resumed_after_a_kill_it_ends_in_the_same_bytes(make_llama: MakeLlama, tmp_path: Path) -> None:
    source = make_llama(num_hidden_layers=6)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {source}\nquantize:\n  scheme: w3g32\n  method: adaround\n  adaround: {{iterations: 20, batch: 4}}\n"
        "  calibration: {samples: 20, sequence_length: 64}\n"
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = compressor("quantize", "--recipe", recipe, "-o", whole)
    assert done.returncode == 0, done.stderr

    running = subprocess.Popen(
        [sys.executable, "-m", "compressor", "quantize", "--recipe", str(recipe), "-o", str(cut)],
        stderr=subprocess.PIPE,
    )
    blocks = tmp_path / ".cut.partial" / "blocks"
    while not (blocks / "block-00002.safetensors").exists() and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    done = compressor("quantize", "--recipe", recipe, "-o", cut)
    assert done.returncode == 0, done.stderr
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
    assert (whole / "compression.json").read_bytes() == (cut / "compression.json").read_bytes()

    layers = json.loads((whole / "compression.json").read_text())["layers"]
    assert {layer["method"] for layer in layers} <= {"adaround", "gptq"}
    better = [layer for layer in layers if layer["method"] == "adaround"]
    assert better
    assert all(layer["block_error"] < layer["block_error_before"] for layer in better)


def test_it_beats_gptq_on_the_built_in_model(tmp_path: Path) -> None:
    kl = {}
    for method in ("gptq", "adaround"):
        out = tmp_path / method
        recipe = tmp_path / f"{method}.yaml"
        recipe.write_text(
            f"model: builtin\nquantize:\n  scheme: w3g32\n  method: {method}\n  adaround: {{iterations: 24}}\n"
            "  calibration: {samples: 48, sequence_length: 128}\n"
        )
        done = compressor("quantize", "--recipe", recipe, "-o", out)
        assert done.returncode == 0, done.stderr
        options = ("--samples", 16, "--sequence-length", 128, "--json")
        done = compressor("evaluate", out, "--baseline", "builtin", *options)
        assert done.returncode == 0, done.stderr
        kl[method] = json.loads(done.stdout)["evaluation"]["metrics"]["kl"]["compressed"]["value"]
    assert kl["adaround"] < 0.9 * kl["gptq"]
