"""The built-in model: small, trained, and damaged by quantization as a real one is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressor.sources.builtin_model import builtin_model_path
from compressor.sources.text import read_rows, tokenize


@pytest.fixture(scope="module")
def directory() -> Path:
    return builtin_model_path()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def test_tokens(tokenizer: Any) -> Tensor:
    """16 windows of 256 from all over the test split."""
    rows = read_rows("builtin:test")
    return tokenize(rows, tokenizer, samples=16, sequence_length=256, pick="spread").input_ids


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.no_grad()
def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    return torch.cat([model(input_ids=batch).logits.log_softmax(-1)[:, :-1] for batch in ids.split(4)])


def nll(log_probs: Tensor, ids: Tensor) -> float:
    return cross_entropy(log_probs.flatten(0, 1), ids[:, 1:].flatten()).item()


@torch.no_grad()
def round_linears(model: Any, bits: int, group: int) -> None:
    """Symmetric absmax rounding to nearest of every block's linear layers, written out plainly."""
    top = 2 ** (bits - 1) - 1
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            groups = module.weight.view(-1, group)
            scale = groups.abs().amax(1, keepdim=True) / top
            module.weight.copy_(((groups / scale).round().clamp(-top, top) * scale).view_as(module.weight))


def test_files_and_their_size(directory: Path) -> None:
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in directory.iterdir()} == expected | {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (directory / "model.safetensors").stat().st_size <= 8e6
    with safe_open(directory / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert 2e6 < sum(tensor.numel() for tensor in tensors) < 5e6


def test_shape_exercises_what_larger_llamas_have(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text("utf-8"))
    assert config["model_type"] == "llama"
    assert config["hidden_size"] % 64 == 0
    assert config["hidden_size"] % 128 != 0
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"]


def test_tokenizer_round_trips_and_adds_one_bos(tokenizer: Any) -> None:
    text = 'def f(x):\n    """Grüße, 日本, 🙂"""\n\treturn x  # done\n'
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert None not in (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert len(tokenizer) == 4096


def test_chat_template(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<s>[user]\nHello</s>\n[assistant]\n"


def test_it_has_learned_text_it_never_saw(directory: Path, test_tokens: Tensor) -> None:
    counts = torch.bincount(test_tokens[:, 1:].flatten(), minlength=4096).float()
    frequencies = counts / counts.sum()
    unigram = (
        -(frequencies * frequencies.clamp_min(1e-12).log()).sum().item()
    )  # of the test tokens themselves
    learned = nll(log_probabilities(load(directory), test_tokens), test_tokens)
    assert learned < unigram - 1.5  # nats per token; the best any model without context can do is ``unigram``


def test_rounding_damages_it_and_fewer_bits_more(directory: Path, test_tokens: Tensor) -> None:
    original = log_probabilities(load(directory), test_tokens)
    damage = {}
    for bits in (8, 4, 3):
        model = load(directory)
        round_linears(model, bits, 64)
        rounded = log_probabilities(model, test_tokens)
        kl = kl_div(rounded, original, log_target=True, reduction="sum") / original[..., 0].numel()
        damage[bits] = (kl.item(), nll(rounded, test_tokens) - nll(original, test_tokens))
    assert damage[8][0] < 1e-3
    assert damage[4][0] > 0.02
    assert damage[3][0] > 4 * damage[4][0]
    assert 0 < damage[4][1] < damage[3][1]
    assert math.isfinite(damage[3][1])
