"""``compressor diagnose``: a planted fault is named, healthy checkpoints are ranked as measured, errors add up as defined."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import run_killed
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from tiny_checkpoint import write_checkpoint
from torch.nn import functional
from transformers import AutoModelForCausalLM, BertConfig, BertModel, OPTConfig, OPTForCausalLM
from typer.testing import CliRunner

from compressor.calibration.stream import outputs
from compressor.cli.diagnose import diagnose as command
from compressor.diagnosis.compare import compare
from compressor.diagnosis.job import DiagnoseSettings, open_job, weight_of
from compressor.diagnosis.run import diagnose
from compressor.diagnosis.schema import Diagnosis
from compressor.errors import CompressorError, UsageError
from compressor.graph import build_skeleton, discover
from compressor.pipelines.quantize import quantize
from compressor.planning.check import check_plan
from compressor.plans import read_plan
from compressor.recipes import Recipe
from compressor.sensitivity.journal import Journal
from compressor.sources.builtin_model import builtin_model_path
from compressor.sources.model import open_model

CPU = torch.device("cpu")
app = typer.Typer()
app.command()(command)
SMALL = ["--samples", "8", "--sequence-length", "32", "--iterations", "10"]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, CompressorError):
        return result.exception.exit_code, str(result.exception)
    assert result.exception is None, result.exception
    return result.exit_code, result.stdout


def settings(original: Path, compressed: Path, **changes: Any) -> DiagnoseSettings:
    return DiagnoseSettings(
        **{
            "original": str(original),
            "compressed": str(compressed),
            "samples": 8,
            "sequence_length": 32,
            "tries": 0,
            **changes,
        }
    )


def edit(checkpoint: Path, target: Path, name: str, change: Any) -> Path:
    """A copy of ``checkpoint`` with the tensor ``name`` changed in the file itself."""
    shutil.copytree(checkpoint, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def model(make_llama: Any) -> Path:
    return make_llama(num_hidden_layers=3, seed=3)


@pytest.fixture(scope="module")
def healthy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(model, tmp_path_factory.mktemp("healthy") / "q", "w4g32")


@pytest.fixture(scope="module")
def ruined(healthy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edit(
        healthy,
        tmp_path_factory.mktemp("ruined") / "q",
        "model.layers.1.mlp.up_proj.weight_scale",
        lambda scale: scale * 1.5,
    )


def test_ruined_scales_are_named_first_and_repaired(model: Path, ruined: Path, tmp_path: Path) -> None:
    code, text = run(model, ruined, "-o", tmp_path / "d", "--json", *SMALL)
    assert code == 0
    data = json.loads(text)
    assert data == json.loads((tmp_path / "d" / "diagnosis.json").read_text("utf-8"))
    found = Diagnosis.model_validate(data)
    unit = "model.layers.1.mlp.gate_up"
    assert found.units[0] == unit
    assert found.first_jump == unit
    assert found.edited is not None
    assert unit in found.edited.units
    assert found.edited.kl_after.value < 0.9 * found.edited.kl_before.value

    assert "<svg" in (tmp_path / "d" / "diagnosis.svg").read_text("utf-8")
    plan = read_plan(tmp_path / "d" / "plan.yaml")
    check_plan(tmp_path / "d" / "plan.yaml", plan, discover(build_skeleton(open_model(str(model)))))
    assert "diagnose" in (plan.layers["model.layers.1.mlp.up_proj"].reason or "")
    assert (tmp_path / "d" / "plan.yaml").read_text("utf-8").startswith("# Made by `compressor diagnose`")


@pytest.mark.parametrize("layer", ["model.layers.0.self_attn.o_proj", "model.layers.2.mlp.down_proj"])
def test_shuffled_codes_are_named_first(model: Path, healthy: Path, tmp_path: Path, layer: str) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    broken = edit(healthy, tmp_path / "q", f"{layer}.weight_packed", lambda codes: codes[order])
    found = diagnose(open_job(settings(model, broken), CPU)).diagnosis
    assert found.units[0] == found.first_jump == layer


def test_a_changed_norm_is_where_the_error_jumps(model: Path, healthy: Path, tmp_path: Path) -> None:
    norm = "model.layers.1.post_attention_layernorm"
    generator = torch.Generator().manual_seed(0)
    broken = edit(
        healthy,
        tmp_path / "q",
        f"{norm}.weight",
        lambda w: w * (1 + torch.randn(w.shape, generator=generator)),
    )
    found = diagnose(open_job(settings(model, broken), CPU)).diagnosis
    assert found.first_jump == norm
    places = {place.name: place for place in found.places}
    assert places["model.layers.1.input_layernorm"].weights_snr_db is None, "equal weights make no error"
    assert places["model.layers.1.input_layernorm"].inherited_snr_db is not None
    assert places["model.norm"].block == 3


def test_ranking_of_a_healthy_checkpoint_agrees_with_measured_single_units(tmp_path: Path) -> None:
    source = builtin_model_path()
    checkpoint = write_checkpoint(source, tmp_path / "q", "w3g32")
    job = open_job(settings(source, checkpoint, samples=16, sequence_length=64, draws=8), CPU)
    found = diagnose(job).diagnosis
    assert found.first_jump is None
    predicted = {place.name: place.predicted_kl for place in found.places if place.predicted_kl is not None}
    assert len(predicted) == len(job.graph.units)

    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = job.scan.tokens.input_ids
    with torch.inference_mode():
        before = reference(ids).logits[:, :-1].log_softmax(-1)
        measured = {}
        for unit in job.graph.units:
            originals = {}
            for layer in unit.layers:
                module = reference.get_submodule(layer.name)
                originals[layer.name] = module.weight.data
                module.weight.data = weight_of(job, layer.name)
            after = reference(ids).logits[:, :-1].log_softmax(-1)
            kl = functional.kl_div(after, before, log_target=True, reduction="sum") / before[..., 0].numel()
            measured[unit.name] = float(kl)
            for name, weight in originals.items():
                reference.get_submodule(name).weight.data = weight
    names = list(measured)
    correlation = spearmanr([predicted[n] for n in names], [measured[n] for n in names]).statistic
    assert correlation > 0.9
    assert found.units[0] in sorted(names, key=lambda n: -measured[n])[:2]


@pytest.mark.parametrize("scheme", ["w4g32", "w8a8"])
def test_contributions_are_what_they_are_said_to_be(model: Path, tmp_path: Path, scheme: str) -> None:
    job = open_job(settings(model, write_checkpoint(model, tmp_path / "q", scheme)), CPU)
    with Journal(tmp_path / "work", {}) as journal:
        compared = compare(job, journal)
        first = next(p for p in compared.places if p.kind == "qkv")
        assert [p.name for p in compared.places][:2] == [
            "model.layers.0.input_layernorm",
            "model.layers.0.self_attn.qkv",
        ]
        assert first.inherited == 0, "nothing came before it"
        assert first.error is not None
        later = next(p for p in compared.places if p.name == "model.layers.1.mlp.down_proj")
        assert later.inherited
        if scheme == "w8a8":
            assert first.activations > 0
            # Independent errors: the whole is about their sum.
            assert first.error == pytest.approx(first.weights + first.activations, rel=0.1)
        else:
            assert first.activations == 0
            assert first.error == pytest.approx(first.weights, rel=1e-4)
        # The stream's last hidden state gives the model's own logits.
        stream = compared.streams[0]
        answer = outputs(job.original, job.graph, stream, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(answer, reference(job.scan.tokens.input_ids).logits, atol=1e-4, rtol=1e-4)


def test_measured_kl_is_that_of_the_two_models(model: Path, healthy: Path) -> None:
    job = open_job(settings(model, healthy), CPU)
    found = diagnose(job).diagnosis
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = job.scan.tokens.input_ids
    with torch.inference_mode():
        before = reference(ids).logits[:, :-1].log_softmax(-1)
        for layer in job.formats:
            reference.get_submodule(layer).weight.data = weight_of(job, layer)
        after = reference(ids).logits[:, :-1].log_softmax(-1)
    kl = float(functional.kl_div(after, before, log_target=True, reduction="sum")) / before[..., 0].numel()
    assert found.kl is not None
    assert found.kl.value == pytest.approx(kl, rel=1e-3)


def test_a_quantized_head_is_compared_too(make_llama: Any, tmp_path: Path) -> None:
    untied = make_llama(tie_word_embeddings=False, seed=5)
    recipe = {"scheme": "w4g32", "method": "rtn", "include": ["lm_head"]}
    quantize(Recipe.model_validate({"model": str(untied), "quantize": recipe}), tmp_path / "q")
    found = diagnose(open_job(settings(untied, tmp_path / "q"), CPU)).diagnosis
    head = found.places[-1]
    assert (head.name, head.kind, head.format) == ("lm_head", "head", "w4g32")
    assert head.weights_snr_db is not None
    assert head.inherited_snr_db is not None
    assert "lm_head" in found.warnings[-1]


def test_models_that_no_scan_follows_are_compared(make_llama: Any, tmp_path: Path) -> None:
    directory = tmp_path / "opt"
    shutil.copytree(make_llama(), directory)  # for its tokenizer
    config = OPTConfig(
        vocab_size=320, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=64, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(directory)
    checkpoint = write_checkpoint(directory, tmp_path / "q", "w4g32")
    job = open_job(settings(directory, checkpoint), CPU)
    found = diagnose(job).diagnosis
    assert found.kl is not None
    assert len(found.units) == len(job.graph.units)
    assert found.edited is None


def test_encoders_without_a_head_are_ranked_by_their_own_errors(make_llama: Any, tmp_path: Path) -> None:
    directory = tmp_path / "bert"
    shutil.copytree(make_llama(), directory)
    config = BertConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(directory)
    healthy = write_checkpoint(directory, tmp_path / "q", "w4g32")
    layer = "encoder.layer.1.output.dense"
    broken = edit(healthy, tmp_path / "r", f"{layer}.weight_scale", lambda scale: scale * 1.5)
    found = diagnose(open_job(settings(directory, broken), CPU)).diagnosis
    assert found.units[0] == layer
    assert found.kl is None
    assert found.fixes == []


def test_refusals_are_one_line(model: Path, healthy: Path, make_llama: Any, tmp_path: Path) -> None:
    def refused(original: Path, compressed: Path) -> str:
        code, text = run(original, compressed, *SMALL)
        assert code == 5
        assert "\n" not in text
        return text

    assert "not a quantized checkpoint" in refused(model, model)
    assert "already quantized" in refused(healthy, healthy)
    assert "not made from" in refused(make_llama(num_hidden_layers=3, seed=4), healthy)
    assert "not made from" in refused(make_llama(num_hidden_layers=2), healthy)
    assert "not made from" in refused(make_llama(num_hidden_layers=3, intermediate_size=256), healthy)
    anonymous = tmp_path / "anonymous"
    shutil.copytree(healthy, anonymous)
    os.unlink(anonymous / "compression.json")
    assert "half of its layers differ" in refused(make_llama(num_hidden_layers=3, seed=4), anonymous)

    mixed = tmp_path / "mixed"
    shutil.copytree(healthy, mixed)
    tensors = load_file(mixed / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    kept = {key: value for key, value in tensors.items() if not key.startswith(name)}
    kept[name] = load_file(model / "model.safetensors")[name]
    save_file(kept, mixed / "model.safetensors", metadata={"format": "pt"})
    assert "need one format" in refused(model, mixed)

    other = tmp_path / "other"
    shutil.copytree(healthy, other)
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["MistralForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    assert "not one model" in refused(model, other)


def test_outputs_are_not_replaced_unasked(model: Path, healthy: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("mine")
    assert run(model, healthy, "-o", tmp_path, *SMALL)[0] == UsageError.exit_code
    assert (tmp_path / "plan.yaml").read_text() == "mine"


def test_a_killed_diagnosis_goes_on_and_ends_in_the_same_bytes(
    model: Path, ruined: Path, tmp_path: Path
) -> None:
    """Killed just before and just after each file that is put in place, those of the result included."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the quick fox number {i} jumps over dog {i * 7 % 13}" for i in range(300)))
    command = ["diagnose", model, ruined, "--data", text, "--try", "2", *SMALL]
    (tmp_path / "a").mkdir()
    assert run_killed([], *command, "-o", tmp_path / "a" / "d")[0] == 0
    moments = [*range(1, 8), *[1, 2] * 5]
    assert run_killed([str(n) for n in moments], *command, "-o", tmp_path / "d")[0] >= 10
    whole, resumed = tmp_path / "a" / "d", tmp_path / "d"
    assert {f.name: f.read_bytes() for f in resumed.iterdir()} == {
        f.name: f.read_bytes() for f in whole.iterdir()
    }
    assert (whole / "plan.yaml").exists()
    assert not (tmp_path / ".d.partial").exists()


def test_tables_name_the_culprit(model: Path, ruined: Path) -> None:
    code, text = run(model, ruined, *SMALL, "--try", "0")
    assert code == 0
    assert "the error jumps at model.layers.1.mlp.gate_up" in " ".join(text.split())
    assert "1.mlp.gate_up ← jump" in text
