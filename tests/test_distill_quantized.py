"""Quantized students: the same grid as the formats, gradients of the chain rule, and packed results that verify."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from compressor.checkpoint.verify import verify
from compressor.cli.main import app
from compressor.distillation import run as run_module
from compressor.distillation.latency import Latency
from compressor.distillation.quantized import FakeQuantized, make_trainable, open_quantized, packed_layers
from compressor.errors import InputRefused
from compressor.formats import parse_format
from compressor.formats.quantize import absmax_scale, fake_quantize, grouped
from compressor.reports.write import read_report
from compressor.sources.model import open_model


def command(*arguments: object) -> None:
    result = CliRunner().invoke(app, list(map(str, arguments)), standalone_mode=False)
    if result.exception is not None:
        raise result.exception


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["w3g32", "w4g32", "w2g64", "w8", "w8a8", "fp8"]), st.integers(0, 1000))
def test_fake_quantization_is_the_formats(name: str, seed: int) -> None:
    fmt = parse_format(name)
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(seed))
    scale = absmax_scale(weight, fmt, torch.bfloat16) * (0.9 if fmt.kind == "int" else 1.0)
    scale = scale.bfloat16().float()
    quantizer = FakeQuantized(scale, fmt, torch.bfloat16)
    values = (grouped(weight, fmt) / scale[..., None]).view(weight.shape)
    assert torch.equal(quantizer(values), fake_quantize(weight, scale, fmt))
    assert torch.equal(quantizer.scale(), scale)


def test_gradients_pass_the_rounding_but_not_the_end_of_the_grid() -> None:
    """For values: the scale, or nothing where a step would leave the grid. For scales: the codes."""
    fmt = parse_format("w3")
    values = torch.tensor([[2.1, -1.1, 9.0, 9.0, -9.0, -9.0]], requires_grad=True)
    quantizer = FakeQuantized(torch.tensor([[0.125]]), fmt, torch.bfloat16)
    weight = quantizer(values)
    assert weight.tolist() == [[0.25, -0.125, 0.375, 0.375, -0.5, -0.5]]
    weight.backward(torch.tensor([[1.0, -2.0, 1.0, -1.0, 1.0, -1.0]]))
    assert values.grad is not None
    assert quantizer.change.grad is not None
    assert values.grad.tolist() == [[0.125, -0.25, 0.125, 0.0, 0.0, -0.125]]
    # d weight / d change = code · first scale · a tenth
    assert quantizer.change.grad.item() == pytest.approx(0.0125 * (2 * 1 + 1 * 2 + 3 - 3 - 4 + 4))


@pytest.fixture(scope="module", params=["w3g32", "w8a8"])
def quantized(
    request: pytest.FixtureRequest, make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    original = make_llama(seed=8, dtype=torch.bfloat16)
    directory = tmp_path_factory.mktemp("q") / "checkpoint"
    command(
        "quantize", original, "-o", directory, "--scheme", request.param, "--method", "rtn", "--device", "cpu"
    )
    return original, directory


def test_training_begins_exactly_at_the_checkpoint(quantized: tuple[Path, Path]) -> None:
    original, directory = quantized
    student = open_quantized(open_model(str(directory), allow_quantized=True))
    model = make_trainable(AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32), student)
    stored = load_file(directory / "model.safetensors")
    for name, tensor in packed_layers(model, student).items():
        assert torch.equal(tensor, stored[name]), name
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("parametrizations" in name for name in trained)


def test_recovery_is_packed_verified_and_better(
    quantized: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, directory = quantized
    fake = Latency(1, 1, 1.0, 1.0, 1.0, 1, "cpu", "float32", 1, 0.01)
    monkeypatch.setattr(run_module, "measure_latency", lambda *a, **k: fake)
    output = tmp_path / "recovered"
    command(
        "distill", original, "-o", output, "--student", f"quantized:{directory}", "--data", "builtin:train", "--samples", 60,
        "--length", 32, "--steps", 30, "--batch-size", 8, "--device", "cpu", "--track", "none",
    )  # fmt: skip
    found = read_report(output).distillation
    assert found is not None
    before, after = (found.arms[a].metrics["kl"].value for a in ("before", "after"))
    if "w3" in json.dumps(json.loads((directory / "compression.json").read_text())["plan"]):
        assert after < before
    assert found.arms["after"].bytes == found.arms["before"].bytes
    assert json.loads((output / "config.json").read_text()) == json.loads(
        (directory / "config.json").read_text()
    )
    old, new = (load_file(d / "model.safetensors") for d in (directory, output))
    assert old.keys() == new.keys()
    same = {name for name in old if torch.equal(old[name], new[name])}
    assert {n for n in old if "embed" in n or "norm" in n} <= same
    assert len(same) < len(old)
    failed = [c for c in verify(output, source=open_model(str(original))) if not c.passed]
    assert not failed


def test_an_ordinary_checkpoint_is_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="not a quantized checkpoint"):
        command(
            "distill", tiny_llama_dir, "-o", tmp_path / "x", "--student", f"quantized:{tiny_llama_dir}", "--device", "cpu"
        )  # fmt: skip
