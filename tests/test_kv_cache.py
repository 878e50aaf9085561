"""FP8 caches of keys and values: scales from what enters them, as stored, as vLLM names them, as they are simulated."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import FAMILIES, make_model, save_family
from cli import run_here
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3nForCausalLM, Gemma3nTextConfig

from compressor.checkpoint.kv_cache import simulate
from compressor.checkpoint.writer import CheckpointWriter
from compressor.engines import check_fp8_cache
from compressor.evaluation.load import load_for_evaluation
from compressor.graph.attention import attention_layers, intercepted, shared_from
from compressor.pipelines.job import prepare
from compressor.recipes import build_recipe
from compressor.sources.text import TokenSet

FEW = ("--samples", 4, "--sequence-length", 32)


def quantize(source: Path, target: Path, *options: object) -> dict[str, Any]:
    code, out, err = run_here("quantize", source, "-o", target, "--json", "--kv-cache", "fp8", *FEW, *options)
    assert code == 0, err
    assert all(check["passed"] for check in json.loads(out)["checks"])
    return json.loads((target / "compression.json").read_text())["kv_cache"]


def stored(target: Path) -> dict[str, float]:
    tensors = load_file(target / "model.safetensors")
    return {name: float(t) for name, t in tensors.items() if name.endswith((".k_scale", ".v_scale"))}


def cached(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What transformers itself keeps in its cache, layer by layer, where a layer keeps keys and values."""
    cache = model(input_ids=ids, use_cache=True).past_key_values
    return [(x.keys, x.values) for x in cache.layers if getattr(x, "keys", None) is not None]


def calibration(source: Path, **settings: object) -> TokenSet:
    """The tokens that ``quantize`` calibrates with."""
    recipe = build_recipe(
        None,
        {
            "model": str(source),
            "quantize.scheme": "bf16",
            "quantize.kv_cache": "fp8",
            "quantize.calibration.samples": 4,
            "quantize.calibration.sequence_length": 32,
            **{f"quantize.calibration.{key}": value for key, value in settings.items()},
        },
    )
    tokens = prepare(recipe).tokens
    assert tokens is not None
    return tokens


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "falcon", "gpt2", "opt", "qwen3"])
def test_scales_are_absmax_over_448_of_what_transformers_caches(name: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", name)
    quantize(source, tmp_path / "q", "--scheme", "bf16")
    tokens = calibration(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.inference_mode():
        expected = cached(model, tokens.input_ids)
    found = list(stored(tmp_path / "q").values())
    assert len(found) == 2 * len(expected) == 4
    scales = [float(x.abs().max()) / 448 for pair in expected for x in pair]
    assert sorted(found) == pytest.approx(sorted(scales), rel=1e-4)


@pytest.mark.parametrize("method", ["rtn", "gptq", "adaround"])
def test_along_with_weights(method: str, tmp_path: Path) -> None:
    """Scales belong to the quantized model: its own keys and values are the largest that were seen."""
    source = save_family(tmp_path / "model", "bamba" if method == "gptq" else "llama")
    scales = quantize(source, tmp_path / "q", "--scheme", "w4g32", "--method", method)
    assert len(scales) == (1 if method == "gptq" else 2)
    config = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == "tensor"
    tensors = load_file(tmp_path / "q/model.safetensors")
    for layer, pair in scales.items():
        for leaf, scale in zip(("k_scale", "v_scale"), pair, strict=True):
            tensor = tensors[f"{layer}.{leaf}"]
            assert (tensor.dtype, tensor.shape) == (torch.float32, (1,))
            assert float(tensor) == scale


def test_batches_and_padding_do_not_matter(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "llama")
    data = tmp_path / "rows.jsonl"
    texts = ["a fox", "the quick brown fox jumps over the lazy dog and does not mind it at all, it is said"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("quantize: {scheme: bf16, calibration: {packing: rows}}")
    options = ("--recipe", recipe, "--data", data)
    one = quantize(source, tmp_path / "a", *options)
    many = quantize(source, tmp_path / "b", *options, "--calibration-memory", "0.00001")
    assert one.keys() == many.keys()
    for layer in one:
        assert one[layer] == pytest.approx(many[layer], rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(source)
    tokens = calibration(source, data=str(data), packing="rows")
    assert not bool(tokens.attention_mask.all())
    tops: list[list[float]] = []
    for ids, mask in zip(tokens.input_ids, tokens.attention_mask, strict=True):
        with torch.inference_mode():
            tops.append(
                [float(x.abs().max()) for pair in cached(model, ids[None, mask.bool()]) for x in pair]
            )
    found = [scale for pair in one.values() for scale in pair]
    assert found == pytest.approx([max(of_all) / 448 for of_all in zip(*tops, strict=True)], rel=1e-4)


def test_constant_zero_values_get_the_floor(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "llama")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    scales = quantize(source, tmp_path / "q", "--scheme", "bf16")
    assert scales["model.layers.0.self_attn"][1] == 2.0**-24
    model = load_for_evaluation(tmp_path / "q")
    assert bool(torch.isfinite(model(torch.arange(8)[None]).logits).all())


class _Fp8Cache(DynamicCache):
    """The cache as an engine keeps it: E4M3 codes and one scale a tensor. Written without compressor's own arithmetic."""

    scales: list[tuple[float, float]]

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        k, v = self.scales[layer]
        coded = [(x / s).clamp(-448, 448).to(torch.float8_e4m3fn) for x, s in ((keys, k), (values, v))]
        return super().update(coded[0].float() * k, coded[1].float() * v, layer, *args, **kwargs)


def test_evaluation_simulates_the_cache(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "llama")
    scales = quantize(source, tmp_path / "q", "--scheme", "bf16")
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    plain = AutoModelForCausalLM.from_pretrained(source)
    cache = _Fp8Cache(config=plain.config)
    cache.scales = list(scales.values())
    with torch.inference_mode():
        brute = plain(input_ids=ids, past_key_values=cache, use_cache=True).logits
        simulated = load_for_evaluation(tmp_path / "q")(input_ids=ids).logits
        unquantized = plain(input_ids=ids).logits
        off = load_for_evaluation(tmp_path / "q", simulate_cache=False)(input_ids=ids).logits
    assert torch.allclose(simulated, brute, atol=1e-4)
    assert torch.equal(off, unquantized)
    assert float((simulated - unquantized).abs().max()) > 1e-3


def test_evaluate_says_so(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "llama")
    quantize(source, tmp_path / "q", "--scheme", "w8")
    code, out, err = run_here(
        "evaluate",
        tmp_path / "q",
        "-b",
        source,
        *FEW,
        "--generations",
        1,
        "--json",
        "-o",
        tmp_path / "report",
    )
    assert code == 0, err
    notes = json.loads(out)["evaluation"]["notes"]
    snippet = f"vllm serve {tmp_path / 'q'} --kv-cache-dtype fp8"
    assert any("simulated FP8 cache" in note and snippet in note for note in notes)
    assert snippet in (tmp_path / "report/report.md").read_text()
    assert "--kv-cache-dtype fp8" in (tmp_path / "q/README.md").read_text()


def test_generation_goes_through_the_cache(tmp_path: Path) -> None:
    """Token by token with a real cache gives what one pass over everything gives."""
    source = save_family(tmp_path / "model", "llama")
    quantize(source, tmp_path / "q", "--scheme", "bf16")
    model = load_for_evaluation(tmp_path / "q")
    ids = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        whole = model(input_ids=ids).logits
        cache = DynamicCache(config=model.config)
        steps = [
            model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits
            for i in range(12)
        ]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4)


def test_plain_transformers_loads_it(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "phi3")
    quantize(source, tmp_path / "q", "--scheme", "w4g32")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "q", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek_v3", "MLA"),
        ("mamba", "no attention layer"),
        ("bert", "decoders"),
        ("t5", "decoders"),
    ],
)
def test_models_without_such_a_cache_are_refused(name: str, words: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", name)
    code, _, err = run_here(
        "quantize", source, "-o", tmp_path / "q", "--kv-cache", "fp8", *FEW, "--scheme", "w4g32"
    )
    assert code == 5
    assert words in err
    assert "checking source weights" not in err


def test_engine_rules(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "llama")  # heads of 16
    options = ("--kv-cache", "fp8", *FEW, "--scheme", "w4g32")
    code, _, err = run_here("quantize", source, "-o", tmp_path / "q", *options, "--engine", "vllm-cpu")
    assert code == 5
    assert "32 must divide" in err
    assert check_fp8_cache("vllm-cpu", [("a", 64)]) is None
    old, new = (check_fp8_cache("vllm-cuda", [("a", 64)], capability=c) for c in (86, 89))
    assert old is not None
    assert "8.9" in old.reason
    assert new is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "k_scale"),
        ("zero", "positive and finite"),
        ("nan", "positive and finite"),
        ("undeclared", "no kv_cache_scheme"),
        ("changed", "not those of compression.json"),
    ],
)
def test_verify_finds_damage(damage: str, words: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "llama")
    target = tmp_path / "q"
    quantize(source, target, "--scheme", "w4g32", "--method", "rtn")
    file = target / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_scale"
    if damage == "missing":
        del tensors[name]
    elif damage == "undeclared":
        config = json.loads((target / "config.json").read_text())
        config["quantization_config"]["kv_cache_scheme"] = None
        (target / "config.json").write_text(json.dumps(config))
    else:
        tensors[name].fill_({"zero": 0.0, "nan": math.nan, "changed": 1.0}[damage])
    save_file(tensors, file, metadata={"format": "pt"})
    code, out, _ = run_here("verify", target, "--source", source, "--json")
    assert code == 4
    failed = {check["name"]: check["detail"] for check in json.loads(out)["checks"] if not check["passed"]}
    assert words in failed["kv cache"]


def test_a_resumed_run_ends_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_family(tmp_path / "model", "llama")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    quantize(source, whole, "--scheme", "w4g32")
    write = CheckpointWriter.write_block

    def killed(self: CheckpointWriter, index: int, *args: Any) -> None:
        if index == 1:
            raise KeyboardInterrupt
        write(self, index, *args)

    monkeypatch.setattr(CheckpointWriter, "write_block", killed)
    code, _, _ = run_here("quantize", source, "-o", resumed, "--kv-cache", "fp8", *FEW, "--scheme", "w4g32")
    assert code == 130
    monkeypatch.setattr(CheckpointWriter, "write_block", write)
    quantize(source, resumed, "--scheme", "w4g32")
    digests = [hashlib.sha256((d / "model.safetensors").read_bytes()).hexdigest() for d in (whole, resumed)]
    assert digests[0] == digests[1]


def test_layers_that_read_another_ones_cache() -> None:
    """Gemma 3n: the last layers attend to what earlier ones cached, which has been through the cache by then."""
    settings = FAMILIES["gemma3"].settings | {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
    }
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**settings)).eval()
    layers = attention_layers(model)
    shared = {name: shared_from(layers, name) for name in layers}
    path = "model.layers.{}.self_attn".format
    assert shared == {path(0): None, path(1): None, path(2): path(0), path(3): path(1)}
    seen: list[str] = []

    def note(name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(name)
        return keys, values

    ids = torch.arange(3, 15)[None]
    with torch.inference_mode(), intercepted(layers, note):
        plain = model(input_ids=ids).logits
    assert seen == [path(0), path(1)]
    simulate(model, dict.fromkeys(layers, (0.5, 0.5)), "tiny")
    with torch.inference_mode():
        assert not torch.allclose(model(input_ids=ids).logits, plain, atol=1e-3)


def test_a_layer_without_scales_is_refused() -> None:
    from compressor.errors import InputRefused

    model = make_model("llama")
    with pytest.raises(InputRefused, match=r"model.layers.1.self_attn"):
        simulate(model, {"model.layers.0.self_attn": (1.0, 1.0)}, "tiny")
