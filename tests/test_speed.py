"""Speed and leaks: a planted leak is found, healthy inference stays quiet, both models are timed alike."""

import json
import math
import mmap
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from tiny_checkpoint import write_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel
from typer.testing import CliRunner

from compressor.cli.evaluate import evaluate
from compressor.errors import CompressorError, GateFailed, MachineLimit, UsageError
from compressor.evaluation.alive import collect, peak_memory
from compressor.evaluation.leak import Growth, growth, growths
from compressor.evaluation.speed import _ratio
from compressor.evaluation.speed_worker import Workload, inference
from compressor.reports.schema import Report
from compressor.reports.terminal import print_report
from compressor.reports.write import render_markdown

CPU = torch.device("cpu")
app = typer.Typer()
app.command()(evaluate)
QUALITY = ["--samples", "4", "--sequence-length", "16", "--device", "cpu"]
SPEED = ["--latency", "--prompt-length", "8", "--new-tokens", "4", "--rounds", "8", "--warmup", "1"]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, CompressorError):
        return result.exception.exit_code, str(result.exception)
    assert result.exception is None, result.exception
    return result.exit_code, result.stdout


def watch(infer: Callable[[], object], runs: int) -> list[Growth]:
    return growths(collect(infer, runs, CPU))


class Hoarder(nn.Module):
    """Keeps every activation, as a forgotten hook does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.kept.append(y)
        return y


def test_a_planted_leak_is_found_and_measured() -> None:
    model = Hoarder().requires_grad_(False)
    found = {g.counter: g for g in watch(lambda: model(torch.ones(4, 8)), 12)}
    assert found["live tensors"].leak
    assert found["live tensors"].slope == 1
    assert found["live tensor bytes"].slope == 4 * 8 * 4
    assert found["live tensor bytes"].leak


def test_memory_outside_tensors_is_seen_too() -> None:
    kept: list[mmap.mmap] = []

    def leak() -> None:
        kept.append(mmap.mmap(-1, 500_000))  # new pages always: malloc may have freed ones to give
        kept[-1].write(b"x" * 500_000)

    found = {g.counter: g for g in watch(leak, 24)}
    assert found["resident bytes"].leak
    assert found["resident bytes"].slope == pytest.approx(500_000, rel=0.2)
    assert not found["live tensors"].leak


@pytest.mark.parametrize("seed", range(3))
def test_healthy_inference_stays_quiet(tiny_llama_dir: Path, seed: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).eval()
    infer = inference(model, "causal-lm", Workload(2, 8, 4, "none", seed))
    assert not [g for g in watch(infer, 12) if g.leak]


def test_a_cache_that_fills_up_is_no_leak() -> None:
    cache: dict[int, Tensor] = {}
    runs = iter(range(100))

    def infer() -> None:
        number = next(runs) % 4
        cache.setdefault(number, torch.ones(1000))

    assert not [g for g in watch(infer, 15) if g.leak]


def test_noise_is_no_leak_and_a_leak_shows_through_noise() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        noise = 1e8 + 3e5 * generator.standard_normal(30)
        assert not growth("resident bytes", noise.tolist()).leak
        step = noise + np.where(np.arange(30) < 15, 0, 1e6)  # one buffer more, once
        assert not growth("resident bytes", (step - noise + 1e8).tolist()).leak
        leaking = growth("resident bytes", (noise + 3e5 * np.arange(30)).tolist())
        assert leaking.leak
        assert leaking.low < 3e5 < leaking.high
    with pytest.raises(ValueError, match="too few"):
        growth("live tensors", [1.0] * 8)


def test_ratios_are_medians_of_pairs() -> None:
    found = _ratio([2.0, 4.0, 6.0, 8.0, 10.0, 1000.0], [1.0, 2.0, 3.0, 4.0, 5.0, 5.0])
    assert found is not None
    assert found.value == 2
    assert found.low is not None
    assert found.low <= 2 <= (found.high or 0)
    few = _ratio([2.0], [1.0])
    assert few is not None
    assert few.low is None
    assert _ratio([], [1.0]) is None


def test_an_inference_has_a_first_token_and_the_others(tiny_llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).eval()
    sample = inference(model, "causal-lm", Workload(2, 8, 5, "none", 0))()
    assert sample.prefill > 0
    assert len(sample.steps) == 4
    assert all(step > 0 for step in sample.steps)
    peak = peak_memory(CPU)
    assert peak is None or peak > 10**7


def test_latency_of_a_pair_through_the_command(tiny_llama_dir: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tiny_llama_dir, tmp_path / "q")
    code, text = run(
        checkpoint, "--baseline", tiny_llama_dir, *QUALITY, *SPEED, "--leak-runs", "12", "--json"
    )
    assert code == 0
    report = Report.model_validate(json.loads(text))
    speed = report.speed
    assert speed is not None
    assert (speed.batch, speed.prompt_length, speed.new_tokens, speed.rounds) == (1, 8, 4, 8)
    for arm in (speed.arms["baseline"], speed.arms["compressed"]):
        assert arm.decode is not None
        for times in (arm.prefill, arm.decode):
            assert 0 < times.p50_ms <= times.p95_ms <= times.p99_ms
        assert arm.prefill.tokens_per_second == pytest.approx(8e3 / arm.prefill.p50_ms)
        assert {g.counter for g in arm.growth} >= {"live tensors", "live tensor bytes"}
    assert speed.prefill_speedup is not None
    assert speed.prefill_speedup.low is not None
    assert speed.decode_speedup is not None
    assert math.isfinite(speed.decode_speedup.value)
    assert "unpacks" in speed.notes[0]
    page = render_markdown(report)
    assert "prefill, tokens/s" in page
    assert "| leak in 12 inferences | none seen | none seen |" in page
    print_report(report)


def test_encoders_are_timed_by_their_forward_pass(make_llama: Any, tmp_path: Path) -> None:
    directory = tmp_path / "bert"
    shutil.copytree(make_llama(), directory)
    config = BertConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    BertModel(config).save_pretrained(directory)
    arguments = [*QUALITY, *SPEED, "--leak-runs", "0", "--json"]
    code, text = run(directory, "--baseline", directory, *arguments)
    assert code == 0, text
    speed = json.loads(text)["speed"]
    assert speed["decode_speedup"] is None
    assert speed["arms"]["compressed"]["decode"] is None
    assert speed["arms"]["compressed"]["prefill"]["p50_ms"] > 0


_LEAKY = """
from transformers import LlamaForCausalLM


class LeakyForCausalLM(LlamaForCausalLM):
    kept = []

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.kept.append(output.logits)
        return output
"""


def test_a_leaking_model_fails_the_run_and_keeps_the_report(tiny_llama_dir: Path, tmp_path: Path) -> None:
    leaky = tmp_path / "leaky"
    shutil.copytree(tiny_llama_dir, leaky)
    (leaky / "modeling_leaky.py").write_text(_LEAKY)
    config = json.loads((leaky / "config.json").read_text()) | {
        "architectures": ["LeakyForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_leaky.LeakyForCausalLM"},
    }
    (leaky / "config.json").write_text(json.dumps(config))
    arguments = [*QUALITY, *SPEED, "--leak-runs", "12", "--trust-remote-code", "-o", tmp_path / "report"]
    code, text = run(leaky, *arguments)
    assert code == GateFailed.exit_code == 3
    assert "memory leak: live tensors grow by 4 tensors an inference" in text
    assert "\n" not in text
    assert json.loads((tmp_path / "report" / "report.json").read_text())["speed"]["arms"]["compressed"]


def test_settings_that_cannot_be_measured_are_refused_first(tiny_llama_dir: Path) -> None:
    for flags, message in (
        (["--compile", "fast"], "reduce-overhead"),
        (["--leak-runs", "5"], "at least 9"),
        (["--prompt-length", "255"], "at most 256"),
    ):
        code, text = run(tiny_llama_dir, *QUALITY, *SPEED, *flags)
        assert code == UsageError.exit_code
        assert message in text


_FAKE_VLLM = '''
import time


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        self.max_tokens = max_tokens


class _Engine:
    """Starts one waiting prompt a step, and gives every started one a token: as with chunked prefill."""

    class model_config:
        dtype = "torch.bfloat16"
        get_vocab_size = staticmethod(lambda: 100)

    def __init__(self, leaky):
        self.left, self.kept, self.leaky = {}, [], leaky

    def add_request(self, name, prompt, sampling):
        assert len(prompt["prompt_token_ids"]) == 8
        self.left[name] = [0, sampling.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        import torch
        if self.leaky:
            self.kept.append(torch.ones(10))
        time.sleep(0.001)
        started = [n for n, (given, _) in self.left.items() if given]
        waiting = [n for n, (given, _) in self.left.items() if not given]
        outputs = []
        for name in started + waiting[:1]:
            self.left[name][0] += 1
            given, most = self.left[name]
            outputs.append(type("Output", (), {"request_id": name, "outputs": [type("O", (), {"token_ids": [0] * given})]}))
            if given == most:
                del self.left[name]
        return outputs


class LLM:
    def __init__(self, model, **settings):
        if "broken" in model:
            raise NotImplementedError("no kernel for this processor")
        print("vllm says hello on standard output")
        assert settings["enable_prefix_caching"] is False
        self.llm_engine = _Engine("leaky" in model)


__version__ = "0.0"
'''


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """An interpreter with an engine of a few lines in place of vLLM."""
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_FAKE_VLLM)
    (package / "inputs.py").write_text("TokensPrompt = dict\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_an_engine_is_timed_step_by_step(tiny_llama_dir: Path, tmp_path: Path, fake_vllm: Path) -> None:
    arguments = [*QUALITY, *SPEED, "--engine", "vllm", "--engine-python", fake_vllm, "--latency-batch", "3"]
    code, text = run(tiny_llama_dir, "--baseline", tiny_llama_dir, *arguments, "--leak-runs", "9", "--json")
    assert code == 0, text
    speed = json.loads(text)["speed"]
    assert (speed["engine"], speed["dtype"], speed["notes"]) == ("vllm 0.0", "bfloat16", [])
    times = speed["arms"]["compressed"]
    # Three prompts take three steps of at least 1 ms until the last has its first token.
    assert times["prefill"]["p50_ms"] >= 3
    assert times["decode"]["p50_ms"] >= 1
    assert not [g for arm in speed["arms"].values() for g in arm["growth"] if g["leak"]]

    for name in ("leaky", "broken"):
        shutil.copytree(tiny_llama_dir, tmp_path / name)
    code, text = run(tmp_path / "leaky", *arguments, "--leak-runs", "9")
    assert code == GateFailed.exit_code
    assert "memory leak" in text
    code, text = run(tmp_path / "broken", *arguments)
    assert code == MachineLimit.exit_code
    assert "vllm cannot run it here (NotImplementedError: no kernel for this processor)" in text


def test_engine_settings_are_refused_first(tiny_llama_dir: Path) -> None:
    for flags, code, message in (
        (["--engine", "tgi"], UsageError.exit_code, "use transformers or vllm"),
        (["--engine", "vllm", "--compile", "max-autotune"], UsageError.exit_code, "reduce-overhead"),
        (["--engine", "vllm", "--engine-python", "/nowhere/python"], UsageError.exit_code, "cannot be run"),
        (["--engine", "vllm", "--engine-python", sys.executable], MachineLimit.exit_code, "has no vllm"),
    ):
        found = run(tiny_llama_dir, *QUALITY, *SPEED, *flags)
        assert found[0] == code
        assert message in found[1]
