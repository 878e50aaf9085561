"""Tiny models that run through the real code: random Llamas with a real (tiny) tokenizer."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compressor.cli.main import main

_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump!",
    "An object is created when its class is called, and deleted when nothing refers to it.",
] * 4


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT, trainer)
    if not special:
        special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


MakeLlama = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> MakeLlama:
    """Make a random Llama directory; keyword arguments change its config, ``dtype`` and ``seed``."""

    def make(*, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Path:
        tokenizer = make_tokenizer()
        config = LlamaConfig(
            **{
                "vocab_size": len(tokenizer),
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
                "initializer_range": 0.2,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                **changes,
            }
        )
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)
        directory = tmp_path_factory.mktemp("llama")
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    return make


def run_killed(moments: Sequence[str], *arguments: object) -> tuple[int, float]:
    """Run ``compressor ARGUMENTS`` as :mod:`killed_run` does, to the end: how many were killed, and the seconds of the
    last one, which must have succeeded."""
    script = Path(__file__).with_name("killed_run.py")
    command = [sys.executable, str(script), ",".join([*moments, "0"]), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    *ended, seconds = done.stdout.split("\n")[:-1]
    assert ended[-1] == "ended 0", (ended, done.stderr)
    return ended.count("killed"), float(seconds.removesuffix(" s"))


@pytest.fixture(scope="session")
def tiny_llama_dir(make_llama: MakeLlama) -> Path:
    return make_llama()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process: (exit code, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compressor", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out, printed.err

    return call
