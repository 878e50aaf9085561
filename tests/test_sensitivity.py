"""A scan against definitions: exact KL, finite differences, a planted fault."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr

from compressor.errors import InputRefused, UsageError
from compressor.sensitivity.damage import concert_ratio, low_rank
from compressor.sensitivity.measured import measure_plan
from compressor.sensitivity.scan import ScanSettings, prepare, scan
from compressor.sensitivity.schema import Sensitivity, read_sensitivity, sensitivity_json

CPU = torch.device("cpu")
SETTINGS = ScanSettings(
    model="", formats=("w3g32", "w4g32", "w8"), samples=8, sequence_length=32, draws=16, memory=0.01
)


def scanned(model: Path, tmp_path: Path, **changes: object) -> Sensitivity:
    job = prepare(replace(SETTINGS, model=str(model), **changes), CPU)
    return scan(job, tmp_path / "sensitivity.json")


def test_predictions_follow_measurements(tiny_llama_dir: Path, tmp_path: Path) -> None:
    predicted = scanned(tiny_llama_dir, tmp_path)
    measured = scanned(tiny_llama_dir, tmp_path, score="measured")
    pairs = [
        (score.damage, measured.units[i].formats[name].damage)
        for i, unit in enumerate(predicted.units)
        for name, score in unit.formats.items()
        if name in ("w4g32", "w8")
    ]
    assert len(pairs) == 16
    assert spearmanr(*zip(*pairs, strict=True)).statistic > 0.9
    for guess, truth in pairs:
        assert guess == pytest.approx(truth, rel=0.6)


def test_measured_unit_is_the_measured_plan_with_only_that_unit(tiny_llama_dir: Path, tmp_path: Path) -> None:
    job = prepare(replace(SETTINGS, model=str(tiny_llama_dir), score="measured"), CPU)
    result = scan(job, tmp_path / "s.json")
    unit = result.units[1]
    plan = {u.name: "bf16" for u in result.units} | {unit.name: "w3g32"}
    alone = sum(measure_plan(job, plan)) / result.tokens
    assert alone == pytest.approx(unit.formats["w3g32"].damage, rel=1e-3)


def test_activation_formats_count_the_error_of_their_inputs(tiny_llama_dir: Path, tmp_path: Path) -> None:
    result = scanned(tiny_llama_dir, tmp_path, formats=("w8", "w8a8"))
    for unit in result.units:
        assert unit.formats["w8a8"].damage > unit.formats["w8"].damage
        assert unit.formats["w8a8"].output_error > unit.formats["w8"].output_error


def test_fragile_unit_ranks_first(make_llama, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = make_llama(num_hidden_layers=3, seed=3)
    weights = load_file(model / "model.safetensors")
    # One input channel ×50, and what feeds it ÷50: the same function, and a grid that one channel stretches.
    weights["model.layers.1.mlp.down_proj.weight"][:, 5] *= 50
    weights["model.layers.1.mlp.up_proj.weight"][5] /= 50
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    result = scanned(model, tmp_path, formats=("w4",))
    worst = max(result.units, key=lambda unit: unit.formats["w4"].damage)
    assert worst.name == "model.layers.1.mlp.down_proj"


def test_same_seed_same_bytes_and_a_killed_scan_resumes(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sensitivity_json(scanned(tiny_llama_dir, tmp_path))
    job = prepare(replace(SETTINGS, model=str(tiny_llama_dir)), CPU)

    import compressor.sensitivity.scan as module

    real, calls = module._score_block, []

    def stop_at_second(*args: object) -> dict[str, object]:
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_score_block", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        scan(job, tmp_path / "b.json")
    assert (tmp_path / ".b.json.partial" / "journal.json").exists()

    counted: list[int] = []

    def count(*args: object) -> dict[str, object]:
        counted.append(1)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_score_block", count)
    assert sensitivity_json(scan(job, tmp_path / "b.json")) == whole
    assert len(counted) == 1, "the finished block must not be scored again"
    assert not (tmp_path / ".b.json.partial").exists()


def test_round_trip_and_refusals(tiny_llama_dir: Path, tmp_path: Path) -> None:
    result = scanned(tiny_llama_dir, tmp_path)
    file = tmp_path / "sensitivity.json"
    file.write_text(sensitivity_json(result), "utf-8")
    assert read_sensitivity(file) == result

    data = json.loads(file.read_text("utf-8"))
    for change, message in (
        ({"version": 2}, "version 2"),
        ({"artifact": "report"}, "not a sensitivity scan"),
        ({"surprise": 1}, "surprise"),
        ({"factor": [[1.0]]}, "every row of factor"),
    ):
        file.write_text(json.dumps(data | change), "utf-8")
        with pytest.raises(UsageError, match=message):
            read_sensitivity(file)


def test_formats_fit_units_and_engines(make_llama, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = make_llama(hidden_size=96, intermediate_size=128, num_attention_heads=3, num_key_value_heads=3)
    job = prepare(
        replace(SETTINGS, model=str(model), formats=("w4g128", "w8", "w8a8"), engine="vllm-cpu"), CPU
    )
    by_kind = {unit.kind: [f.name for f in job.formats[unit.name]] for unit in job.graph.units}
    assert by_kind["qkv"] == ["w4g32", "w8a8"]  # 96 inputs: neither 128 nor 64 divides them; no w8 kernel
    assert by_kind["down"] == ["w4g128", "w8a8"]
    assert any("cannot load w8" in message for message in job.warnings)
    with pytest.raises(UsageError, match="nothing to scan"):
        prepare(replace(SETTINGS, model=str(model), formats=("w3g32",), engine="vllm-cpu"), CPU)


def test_encoder_without_head_is_refused_with_advice(tmp_path: Path) -> None:
    from conftest import make_tokenizer
    from transformers import BertConfig, BertModel

    tokenizer = make_tokenizer(pad_token="<pad>", cls_token="<s>", sep_token="</s>")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    with pytest.raises(InputRefused, match="output-mse"):
        prepare(replace(SETTINGS, model=str(tmp_path / "bert")), CPU)
    result = scanned(tmp_path / "bert", tmp_path, score="output-mse", formats=("w4g32", "w8"))
    assert all(u.formats["w4g32"].damage > 10 * u.formats["w8"].damage > 0 for u in result.units)


def test_concert_ratio_shrinks_to_its_kind_by_the_share_of_noise() -> None:
    tokens = torch.tensor([1.0, 2.0, 4.0, 0.0], dtype=torch.float64)
    sequences = torch.tensor([2.0, 8.0, 4.0, 0.0], dtype=torch.float64)
    # Few samples: all of the scatter may be noise, and both move to their mean, but half an error at most.
    ratio = concert_ratio(tokens, sequences, ["a", "a", "b", "b"], 2)
    assert ratio.tolist() == pytest.approx([8**0.5, 8**0.5, 1.0, 1.0])
    ratio = concert_ratio(tokens, sequences, ["a", "a", "b", "b"], 10**9)
    assert ratio.tolist() == pytest.approx([2.0, 4.0, 1.0, 1.0])
    # One far from its kind moves by no more than half its standard error.
    many = torch.full((9,), 1.0, dtype=torch.float64)
    outlier = torch.cat([many, torch.tensor([8.0], dtype=torch.float64)])
    ratio = concert_ratio(torch.ones_like(outlier), outlier, ["a"] * 10, 8)
    assert float(ratio[-1]) == pytest.approx(8 * 2.718281828**-0.25)


def test_low_rank_keeps_a_low_rank_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    factor = torch.tensor(low_rank(rows.T @ rows), dtype=torch.float64)
    assert len(factor) == 3
    assert torch.allclose(factor.T @ factor, rows.T @ rows, atol=1e-3)
