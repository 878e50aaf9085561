"""``quantize --format bitsandbytes``: written, reloaded, equal; refused by name where it has no words."""

import json
from pathlib import Path

import pytest
import torch
from architectures import save_family
from cli import run_here
from conftest import MakeLlama
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_a_decoder_is_reloaded_as_it_was_saved(scheme: str, tmp_path: Path, make_llama: MakeLlama) -> None:
    source = make_llama(dtype=torch.bfloat16)
    options = ("--format", "bitsandbytes", "--scheme", scheme, "--ignore", "model.layers.0.mlp.down_proj")
    code, out, err = run_here("quantize", source, "-o", tmp_path / "q", "--json", *options)
    assert code == 0, err
    assert all(check["passed"] for check in json.loads(out)["checks"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    kinds = {name: type(module).__module__ for name, module in model.named_modules()}
    assert "bitsandbytes" in kinds["model.layers.1.mlp.down_proj"]
    for kept in ("model.layers.0.mlp.down_proj", "lm_head"):  # --ignore adds to what is kept anyway
        assert "bitsandbytes" not in kinds[kept]
    assert (tmp_path / "q/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_classifier_keeps_its_head(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "bert")
    code, _, err = run_here(
        "quantize", source, "-o", tmp_path / "q", "--format", "bitsandbytes", "--scheme", "int8"
    )
    assert code == 0, err
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "q")
    assert type(model.classifier) is torch.nn.Linear


@pytest.mark.parametrize(
    ("family", "options", "code", "words"),
    [
        ("llama", ("--method", "gptq"), 2, "method: --format bitsandbytes cannot express it"),
        ("llama", ("--kv-cache", "fp8"), 2, "kv_cache: --format bitsandbytes cannot express it"),
        ("llama", ("--scheme", "w4g32"), 2, "nf4 and int8"),
        ("llama", ("--verify-engine", "vllm"), 2, "stock vLLM"),
        ("llama", (), 5, "96 inputs"),
        ("gpt2", (), 5, "conv1d"),
        ("mixtral", (), 5, "expert"),
    ],
)
def test_what_it_cannot_express_is_refused(
    family: str, options: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    source = save_family(tmp_path / "model", family)
    found, _, err = run_here("quantize", source, "-o", tmp_path / "q", "--format", "bitsandbytes", *options)
    assert found == code, err
    assert words in err
    assert not (tmp_path / "q").exists()
