"""``compressor evaluate`` on real checkpoints: loading, preflight, the report it makes, the refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from compressor.cli.evaluate import evaluate
from compressor.errors import CompressorError, InputRefused, MachineLimit, UsageError
from compressor.evaluation.facts import available_memory, model_facts
from compressor.evaluation.load import load_for_evaluation, task_of
from compressor.evaluation.prepare import Settings, prepare, resolve_device, resolve_dtype
from compressor.reports.write import read_report
from compressor.sources.model import open_model

app = typer.Typer()
app.command()(evaluate)

MakeLlama = Callable[..., Path]
TEXT = "".join(f"Line {i}: the quick brown fox counts to {i * i} and rests.\n" for i in range(200))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text(TEXT)
    return file


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_quantized(
    source: Path, target: Path, *, bits: int, activations: bool = False
) -> dict[str, torch.Tensor]:
    """A compressed-tensors copy of ``source`` by the format's own library; returns the dense weights it stands for."""
    copy(source, target)
    tensors = load_file(source / "model.safetensors")
    group = None if activations else 32
    weights = QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy="group" if group else "channel", group_size=group
    )
    inputs = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    kind = "int-quantized" if activations else "pack-quantized"
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs if activations else None, format=kind
    )
    stored, dense = {}, {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = dense[name] = weight
            continue
        rows = weight.reshape(len(weight), -1, group or weight.shape[1])
        scale = rows.abs().amax(-1) / (2 ** (bits - 1) - 0.5)
        codes = (rows / scale[..., None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        dense[name] = (codes * scale[..., None]).reshape(weight.shape)
        compressor = BaseCompressor.get_value_from_registry(kind)
        packed = compressor.compress({"weight": dense[name], "weight_scale": scale}, scheme)
        stem = name.removesuffix("weight")
        stored |= {stem + key: value.contiguous() for key, value in packed.items()}
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    edit_json(target / "config.json", quantization_config=quantization)
    return dense


def run(*arguments: object) -> Any:
    """Run ``compressor evaluate``; errors of the tool come out as exceptions."""
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=True)
    if isinstance(result.exception, CompressorError):
        raise result.exception
    return result


# Loading


def test_loads_a_packed_checkpoint_as_the_weights_it_stands_for(tiny_llama_dir: Path, tmp_path: Path) -> None:
    dense = write_quantized(tiny_llama_dir, tmp_path / "w4", bits=4)
    ids = torch.arange(24)[None]
    reference = LlamaForCausalLM.from_pretrained(tiny_llama_dir).eval()
    original = reference(ids).logits
    reference.load_state_dict(dense, strict=False)
    model = load_for_evaluation(tmp_path / "w4")
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits, reference(ids).logits, rtol=1e-5, atol=1e-5)
    assert (logits - original).abs().max() > 1e-2
    assert not model.training


def test_activation_quantization_stays_on(tiny_llama_dir: Path, tmp_path: Path) -> None:
    dense = write_quantized(tiny_llama_dir, tmp_path / "w8a8", bits=8, activations=True)
    weights_only = LlamaForCausalLM.from_pretrained(tiny_llama_dir).eval()
    weights_only.load_state_dict(dense, strict=False)
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        difference = load_for_evaluation(tmp_path / "w8a8")(input_ids=ids).logits - weights_only(ids).logits
    assert 1e-4 < difference.abs().max() < 1


def test_loading_is_silent(tiny_llama_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_quantized(tiny_llama_dir, tmp_path / "w4", bits=4)
    capfd.readouterr()
    load_for_evaluation(tmp_path / "w4")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_a_missing_or_misshapen_weight_is_refused_not_invented(tiny_llama_dir: Path, tmp_path: Path) -> None:
    broken = copy(tiny_llama_dir, tmp_path / "broken")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(broken / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if k != name},
        broken / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(InputRefused, match=f"lacks 1 weights of LlamaForCausalLM, first {name}"):
        load_for_evaluation(broken)
    save_file(tensors | {name: torch.zeros(3, 3)}, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputRefused, match=rf"{name} has shape \[3, 3\]"):
        load_for_evaluation(broken)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "causal-lm"),
        ({"architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "causal-lm"),
        ({"architectures": ["BertForMaskedLM"]}, "masked-lm"),
        ({"architectures": ["BertModel"]}, "embedding"),
    ],
)
def test_task_follows_the_architecture(config: dict[str, Any], task: str) -> None:
    assert task_of(config, Path("x")) == task


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"architectures": ["BertForSequenceClassification"]},
    ],
)
def test_other_architectures_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputRefused, match=r"architecture|encoder-decoder|evaluate supports"):
        task_of(config, Path("x"))


# Facts


def test_size_facts_count_packed_weights_unpacked(tiny_llama_dir: Path, tmp_path: Path) -> None:
    write_quantized(tiny_llama_dir, tmp_path / "w4", bits=4)
    write_quantized(tiny_llama_dir, tmp_path / "w8", bits=8, activations=True)
    expected = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tiny_llama_dir).parameters())
    original = model_facts(open_model(str(tiny_llama_dir)))
    assert original.parameters == expected
    assert original.bytes == (tiny_llama_dir / "model.safetensors").stat().st_size
    assert original.bits_per_weight == pytest.approx(8 * original.bytes / expected)
    assert original.quantization is None
    for name in ("w4", "w8"):
        packed = model_facts(open_model(str(tmp_path / name), allow_quantized=True))
        assert packed.parameters == expected
        assert packed.bits_per_weight < original.bits_per_weight
        assert packed.quantization == "compressed-tensors"
        assert packed.files[0].header_sha256 != original.files[0].header_sha256


def test_dtype_auto_is_the_configs_or_the_stored_one(make_llama: MakeLlama, tmp_path: Path) -> None:
    directory = make_llama(dtype=torch.bfloat16)
    assert resolve_dtype("auto", open_model(str(directory))) == "bfloat16"
    silent = copy(directory, tmp_path / "silent")
    config = json.loads((silent / "config.json").read_text())
    config.pop("dtype")
    (silent / "config.json").write_text(json.dumps(config))
    assert resolve_dtype("auto", open_model(str(silent))) == "bfloat16"
    assert resolve_dtype("float32", open_model(str(silent))) == "float32"
    assert resolve_dtype("auto", open_model(str(silent)), "cpu") == "float32"
    with pytest.raises(UsageError, match="--dtype int8"):
        resolve_dtype("int8", open_model(str(silent)))


def test_devices_resolve() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in ("cpu", "cuda", "mps")
    with pytest.raises(UsageError, match="--device cuda:77"):
        resolve_device("cuda:77")
    assert available_memory("cpu") > 2**20


# Preflight


def settings(text_file: Path, **changes: Any) -> Settings:
    return Settings(
        **({"data": str(text_file), "samples": 8, "sequence_length": 64, "device": "cpu"} | changes)
    )


def test_other_tokenizer_is_refused(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    other = copy(tiny_llama_dir, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["fox"])
    tokenizer.save_pretrained(other)
    with pytest.raises(InputRefused, match=r"1 vocabulary entries differ, first 'fox'"):
        prepare(open_model(str(tiny_llama_dir)), open_model(str(other)), settings(text_file))


def test_other_merges_are_refused(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    other = copy(tiny_llama_dir, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:3]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputRefused, match="splits text differently"):
        prepare(open_model(str(tiny_llama_dir)), open_model(str(other)), settings(text_file))


def test_too_long_sequences_are_refused(tiny_llama_dir: Path, text_file: Path) -> None:
    with pytest.raises(UsageError, match="takes at most 256 tokens"):
        prepare(None, open_model(str(tiny_llama_dir)), settings(text_file, sequence_length=257))


def test_memory_is_checked_before_loading(
    tiny_llama_dir: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(str(tiny_llama_dir))
    ready = prepare(source, source, settings(text_file))
    assert ready.memory_needed > 2 * model_facts(source).parameters * 4
    monkeypatch.setattr("compressor.evaluation.prepare.available_memory", lambda device: 1000)
    with pytest.raises(MachineLimit, match="both models need"):
        prepare(source, source, settings(text_file))


# The command


def test_report_of_a_quantized_checkpoint(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    write_quantized(tiny_llama_dir, tmp_path / "w4", bits=4)
    arguments = (
        tmp_path / "w4", "--baseline", tiny_llama_dir, "--data", text_file, "--samples", 12, "--sequence-length", 64,
        "--device", "cpu",
    )  # fmt: skip
    result = run(*arguments, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "KL(original" in result.output
    report = read_report(tmp_path / "out")
    assert report.evaluation is not None
    metrics = report.evaluation.metrics
    kl = metrics["kl"].compressed
    assert kl.low is not None
    assert kl.high is not None
    assert 0 < kl.low < kl.value < kl.high
    assert report.evaluation.tokens == 12 * 63
    assert report.evaluation.sequences == 12
    assert report.artifact is not None
    assert report.source is not None
    assert report.artifact.bytes < report.source.bytes
    assert "perplexity" in (tmp_path / "out" / "report.md").read_text()

    with pytest.raises(UsageError, match="--overwrite"):
        run(*arguments, "--output", tmp_path / "out")
    again = run(*arguments, "--output", tmp_path / "out", "--overwrite", "--json", "--batch-size", 12)
    document = json.loads(again.stdout)
    assert document["evaluation"]["metrics"]["kl"]["compressed"]["value"] == pytest.approx(kl.value, rel=1e-4)


def test_identical_models_have_zero_divergence(tiny_llama_dir: Path, text_file: Path) -> None:
    result = run(
        tiny_llama_dir,
        "-b",
        tiny_llama_dir,
        "-d",
        text_file,
        "--samples",
        8,
        "--sequence-length",
        32,
        "--json",
    )
    metrics = json.loads(result.stdout)["evaluation"]["metrics"]
    assert metrics["kl"]["compressed"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert metrics["top1_agreement"]["compressed"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert metrics["perplexity"]["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_without_a_baseline_there_is_perplexity_only(tiny_llama_dir: Path, text_file: Path) -> None:
    result = run(tiny_llama_dir, "-d", text_file, "--samples", 4, "--sequence-length", 32, "--json")
    report = json.loads(result.stdout)
    assert set(report["evaluation"]["metrics"]) == {"perplexity", "nll"}
    assert report["source"] is None
    assert any("too few" in text for text in report["evaluation"]["notes"])


def test_perplexity_equals_transformers_own_loss(tiny_llama_dir: Path, text_file: Path) -> None:
    """The same windows through ``model(labels=...)``, which is an independent implementation."""
    ready = prepare(None, open_model(str(tiny_llama_dir)), settings(text_file))
    model = LlamaForCausalLM.from_pretrained(tiny_llama_dir).eval()
    ids = ready.tokens.input_ids
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss
    result = run(tiny_llama_dir, "-d", text_file, "--samples", 8, "--sequence-length", 64, "--json")
    nll = json.loads(result.stdout)["evaluation"]["metrics"]["nll"]["compressed"]["value"]
    assert nll == pytest.approx(float(loss), rel=1e-5)


def test_dry_run_measures_nothing(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run must not load weights")

    monkeypatch.setattr("compressor.evaluation.run.load_for_evaluation", refuse)
    common = (tiny_llama_dir, "-b", tiny_llama_dir, "-d", text_file, "--samples", 4, "--sequence-length", 32)
    result = run(*common, "--dry-run", "--json", "--output", tmp_path / "out")
    facts = json.loads(result.stdout)
    assert facts["task"] == "causal-lm"
    assert facts["memory_needed_bytes"] > 0
    assert "would evaluate as causal-lm: 4 sequences" in run(*common, "--dry-run").output
    assert not (tmp_path / "out").exists()


def test_bad_weights_leave_no_report(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    broken = copy(tiny_llama_dir, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputRefused, match=r"broken: NaN or infinite logits at sequence 0"):
        run(broken, "-d", text_file, "--samples", 4, "--sequence-length", 32, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Encoders


@pytest.fixture(scope="module")
def bert_dir(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[type, int], Path]:
    def make(model_class: Any, seed: int) -> Path:
        directory = tmp_path_factory.mktemp("bert")
        llama = AutoTokenizer.from_pretrained(tiny_llama_dir)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=llama.backend_tokenizer, pad_token="<pad>", mask_token="<s>", unk_token="</s>"
        )
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=128,
        )
        torch.manual_seed(seed)
        model_class(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    return make


def test_encoders_are_compared_by_embeddings(bert_dir: Callable[[type, int], Path], text_file: Path) -> None:
    first, second = bert_dir(BertModel, 0), bert_dir(BertModel, 1)
    result = run(second, "-b", first, "-d", text_file, "--samples", 20, "--sequence-length", 32, "--json")
    evaluation = json.loads(result.stdout)["evaluation"]
    assert evaluation["task"] == "embedding"
    assert evaluation["pooling"] == "mean"
    assert evaluation["metrics"]["cosine"]["compressed"]["value"] < 0.9
    same = run(first, "-b", first, "-d", text_file, "--samples", 20, "--sequence-length", 32, "--json")
    metrics = json.loads(same.stdout)["evaluation"]["metrics"]
    assert metrics["cosine"]["compressed"]["value"] == pytest.approx(1, abs=1e-9)
    assert metrics["neighbour_agreement"]["compressed"]["value"] == 1
    with pytest.raises(UsageError, match="--baseline"):
        run(first, "-d", text_file)


def test_masked_language_models_are_scored_at_hidden_tokens(
    bert_dir: Callable[[type, int], Path], text_file: Path
) -> None:
    first, second = bert_dir(BertForMaskedLM, 0), bert_dir(BertForMaskedLM, 1)
    result = run(second, "-b", first, "-d", text_file, "--samples", 20, "--sequence-length", 32, "--json")
    evaluation = json.loads(result.stdout)["evaluation"]
    assert evaluation["task"] == "masked-lm"
    assert 20 <= evaluation["tokens"] < 0.3 * 20 * 32
    assert evaluation["metrics"]["kl"]["compressed"]["value"] > 0
