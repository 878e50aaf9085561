"""Every family that people bring, through the whole command line: quantized, verified, reloaded, equal.

The README's table of families is made of these tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from architectures import FAMILIES, TITLES, make_model, save_family
from cli import run_here
from fuzzing import fuzz_once
from safetensors.torch import load_file, save_file

from compressor.calibration.stream import advance, enter_block, open_stream, outputs
from compressor.checkpoint.artifact import Artifact, open_artifact
from compressor.checkpoint.reload import dense_model, token_sequences
from compressor.checkpoint.writer import CheckpointWriter
from compressor.distillation import run as distill_run
from compressor.distillation.latency import Latency
from compressor.errors import InputRefused
from compressor.evaluation.load import load_for_evaluation
from compressor.graph import build_skeleton, discover, load
from compressor.graph.experts import all_tokens_seen
from compressor.graph.inputs import token_inputs
from compressor.sources import tensors
from compressor.sources.model import load_tokenizer, open_model

SUPPORTED = [name for name in FAMILIES if name != "gpt_oss"]
SCANNED = [n for n in SUPPORTED if FAMILIES[n].kind in ("causal", "vision") or n == "bert_mlm"]
SEQ2SEQ = [n for n in SUPPORTED if FAMILIES[n].kind in ("seq2seq", "speech")]
VISION = [n for n in SUPPORTED if FAMILIES[n].kind == "vision"]
CLASSIFIERS = [n for n in SUPPORTED if FAMILIES[n].kind == "encoder" and n != "bert_mlm"]
EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "jamba"]
GAPS = {"gpt2": "Conv1D", "mamba": "out_proj", "mamba2": "out_proj"}  # what transformers alone does not load
NOT_DISTILLED = {"jamba": "no student can be derived", "whisper": "speech"}
FEW = ("--samples", 4, "--sequence-length", 32)


def cells(name: str, vllm: dict[str, Any]) -> tuple[str, ...]:
    """A family's row of the README's table, from the lists that say how its tests have to end."""
    speech = FAMILIES[name].kind == "speech"
    notes = [note for note, names in (("¹", GAPS), ("³", EXPERTS), ("⁶", VISION)) if name in names]
    quantize = " ".join(["yes", *notes]) if name in SUPPORTED else "no ⁴"
    if name in SCANNED:
        scan = "yes ³" if name in EXPERTS else "yes"
    else:
        scan = "by output error ⁵" if name in CLASSIFIERS else "no ⁴"
    distill = "yes ²" if name in (*EXPERTS, "gpt2") else "yes"
    outcomes = {scheme: found["outcome"] for scheme, found in vllm["families"][name].items()}
    loads = ", ".join(scheme for scheme, outcome in outcomes.items() if outcome == "yes")
    if not loads:
        loads = "not run ⁸" if "not run" in outcomes.values() else "no ⁷"
    return (
        "rtn only ⁴" if speech else quantize,
        scan,
        "no ⁴" if name in NOT_DISTILLED else distill,
        "–" if name not in SUPPORTED else loads,
    )


def test_the_readme_has_a_cell_for_every_test() -> None:
    """So that nothing is claimed without a test or tested without being listed."""
    root = Path(__file__).parents[1]
    vllm = json.loads((root / "tests" / "data" / "vllm_families.json").read_text("utf-8"))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in FAMILIES:
        rows.setdefault(cells(name, vllm), []).append(TITLES[name])
    table = "| family | quantize | scan, plan | distill | vLLM loads |\n|---|---|---|---|---|\n"
    table += "".join(f"| {', '.join(names)} | {' | '.join(row)} |\n" for row, names in rows.items())
    text = (root / "README.md").read_text("utf-8")
    assert table in text, f"the README's table should be\n\n{table}"
    assert f"vLLM {vllm['vllm']} on {vllm['processor']}" in text


def refused(result: tuple[int, str, str], *words: str) -> str:
    """Exit 5 with one line on standard error that holds all ``words``, before a weight was read."""
    code, _, err = result
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 5, err
    assert len(lines) == 1, err
    assert "Traceback" not in err
    assert "checking source weights" not in err
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


def quantized(source: Path, target: Path, *options: object) -> dict[str, Any]:
    """Quantize, and return the sidecar of the verified checkpoint."""
    code, out, err = run_here("quantize", source, "-o", target, "--json", *options)
    assert code == 0, err
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    for name in ("kept tensors", "coverage", "reloaded weights", "reloaded outputs", "probe"):
        assert checks[name]["passed"], checks[name]
        assert not checks[name]["detail"].startswith("skipped"), checks[name]
    return json.loads((target / "compression.json").read_text())


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_quantize_verify_reload(name: str, method: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    source = save_family(
        tmp_path / "model", name, dtype=torch.float32 if method == "gptq" else torch.bfloat16
    )
    data = FEW if method == "gptq" else ()
    if family.kind == "speech" and method == "gptq":
        refused(
            run_here("quantize", source, "-o", tmp_path / "q", *data), "WhisperFor", "speech", "--method rtn"
        )
        return
    sidecar = quantized(source, tmp_path / "q", "--scheme", "w4g32", "--method", method, *data)
    coverage = sidecar["coverage"]
    assert coverage["ratio"] >= family.floor
    if family.floor < 0.99:
        assert any(family.why in reason for reason in coverage["uncovered"].values())
    assert not any("not a" in reason for reason in coverage["uncovered"].values())
    for record in sidecar["layers"]:
        assert record["method"] == method or "gptq was worse" in record["note"]


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5", "mamba"])
def test_adaround_learns_what_is_stored_otherwise(name: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", name)
    sidecar = quantized(source, tmp_path / "q", "--scheme", "w3g32", "--method", "adaround", *FEW)
    assert any(record["method"] == "adaround" for record in sidecar["layers"])


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_engine_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    """The other tests run the engine in this process, which must not be what makes them pass."""
    import subprocess
    import sys

    source = save_family(tmp_path / "model", name)
    quantized(source, tmp_path / "q", "--scheme", "w4g32", "--method", "rtn")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "compressor",
            "verify",
            tmp_path / "q",
            "--source",
            source,
            "--engine",
            "transformers",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SCANNED)
def test_scan_plan_quantize(name: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", name)
    scan, plan = tmp_path / "scan.json", tmp_path / "plan.yaml"
    code, _, err = run_here("scan-sensitivity", source, "-o", scan, "--formats", "w4g32,w8,bf16", *FEW)
    assert code == 0, err
    units = json.loads(scan.read_text())["units"]
    assert all(unit["formats"]["w4g32"]["damage"] >= 0 for unit in units)
    assert all(unit["formats"]["w4g32"]["output_error"] > 0 for unit in units)
    pins = ("--pin", "*.experts=w4g32") if any(unit["kind"] == "experts" for unit in units) else ()
    code, _, err = run_here("plan", scan, "-o", plan, "--budget", "6bits", *pins)
    assert code == 0, err
    sidecar = quantized(source, tmp_path / "q", "--plan", plan, "--method", "rtn")
    formats = {name: layer["format"] for name, layer in yaml.safe_load(plan.read_text())["layers"].items()}
    assert {record["module"]: record["format"] for record in sidecar["layers"]} == {
        name: fmt for name, fmt in formats.items() if fmt != "bf16"
    }


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_are_scanned_by_output_error(name: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", name)
    scan = ("scan-sensitivity", source, "-o", tmp_path / "scan.json", "--formats", "w4g32,bf16", *FEW)
    refused(run_here(*scan), "--score output-mse")
    code, _, err = run_here(*scan, "--score", "output-mse")
    assert code == 0, err
    code, _, err = run_here("plan", tmp_path / "scan.json", "-o", tmp_path / "plan.yaml", "--budget", "9bits")
    assert code == 0, err
    quantized(source, tmp_path / "q", "--plan", tmp_path / "plan.yaml", "--method", "rtn")


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoders_are_not_scanned(name: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", name)
    refused(run_here("scan-sensitivity", source, "-o", tmp_path / "scan.json", *FEW), "encoder-decoder")


@pytest.fixture
def no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing the student takes two processes, and has tests of its own."""
    fake = Latency(1, 1, 1.0, 1.0, 1000.0, 1, "cpu", "float32", 1, 0.1)
    monkeypatch.setattr(distill_run, "measure_latency", lambda *a, **k: fake)


@pytest.mark.usefixtures("no_latency")
@pytest.mark.parametrize("name", FAMILIES)
def test_distill(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    source = save_family(tmp_path / "model", name)
    rows = []
    for number in range(12):
        text = f"the quick brown fox {number} jumps over the lazy dog, and the dog does not mind"
        match family.kind, name:
            case "seq2seq", _:
                rows.append({"source": text, "target": f"a dog {number}"})
            case "encoder", "bert_mlm":
                rows.append({"text": text})
            case "encoder", _:
                rows.append({"text": text, "label": number % 2})
            case _:
                rows.append({"text": text})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = run_here(
        "distill", source, "-o", tmp_path / "student", "--student", "derive:layers=1", "--data", tmp_path / "rows.jsonl",
        "--steps", 1, "--batch-size", 2, "--length", 16,
    )  # fmt: skip
    if name in NOT_DISTILLED:  # Jamba's layers differ from each other, so none can be left out
        refused(result, NOT_DISTILLED[name])
        return
    assert result[0] == 0, result[2]
    student = load_for_evaluation(tmp_path / "student")
    blocks = discover(build_skeleton(open_model(str(tmp_path / "student")))).blocks
    assert len(blocks) == (3 if family.kind == "seq2seq" else 1)  # of two stacks the decoder gets shorter
    assert all(bool(torch.isfinite(p).all()) for p in student.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_inspect_reads_no_weights_and_says_what_is_skipped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_family(tmp_path / "model", name)

    def no(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(tensors, "read_tensor", no)
    monkeypatch.setattr("compressor.graph.skeleton.read_tensor", no)
    code, out, err = run_here("inspect", source, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["coverage"]["ratio"] >= (0.1 if name == "gpt_oss" else FAMILIES[name].floor)
    assert bool(found["unsupported"]) == (name == "gpt_oss")
    listed = {layer for unit in found["units"] for layer in unit["layers"]} | set(found["kept"])
    called = {entry.name: name for name, entry in build_skeleton(open_model(str(source))).stored.items()}
    for stored in load_file(source / "model.safetensors"):
        tensor = called[stored]
        layer = tensor.rpartition(".")[0]
        shape = load_file(source / "model.safetensors")[stored].shape
        if sum(side > 1 for side in shape) > 1 and "embed_out" not in tensor:
            assert (
                layer in listed
                or tensor in listed
                or "relative_attention_bias" in tensor
                or "rel_emb" in tensor
            )
    code, text, _ = run_here("inspect", source)
    assert code == 0
    assert "quantizable: " in text
    assert ("refused by quantize" in " ".join(text.split())) == (name == "gpt_oss")


def test_experts_in_one_tensor_are_refused_and_may_be_kept_by_name(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "gpt_oss")
    target = tmp_path / "q"
    for command in (
        ("quantize", source, "-o", target),
        ("scan-sensitivity", source, "-o", tmp_path / "s.json"),
    ):
        line = refused(run_here(*command, *FEW), "86%", "experts.down_proj", "--ignore '*.experts.*'")
    assert not target.exists()
    pattern = line.rpartition("--ignore '")[2].rstrip("'")
    sidecar = quantized(source, target, "--scheme", "w4g32", "--method", "rtn", "--ignore", pattern)
    assert sidecar["coverage"]["ratio"] < 0.2
    assert set(sidecar["coverage"]["uncovered"].values()) == {"ignored by the user", "router"}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_compute_what_transformers_computes_and_all_tokens_change_nothing(
    name: str, tmp_path: Path
) -> None:
    source = save_family(tmp_path / "model", name)
    ids = torch.randint(0, 300, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = make_model(name)(input_ids=ids).logits
    skeleton = build_skeleton(open_model(str(source)))
    model = load(skeleton, "", dtype=torch.float32)
    with torch.no_grad():
        routed = model(input_ids=ids).logits
        with all_tokens_seen(model) as stacks:
            everywhere = model(input_ids=ids).logits
    torch.testing.assert_close(routed, expected, rtol=1e-5, atol=1e-5 * float(expected.std()))
    torch.testing.assert_close(everywhere, routed, rtol=1e-5, atol=1e-5 * float(expected.std()))
    assert stacks
    per_token = skeleton.config.num_experts_per_tok
    assert all(int(experts.chosen.sum()) == ids.numel() * per_token for _, experts in stacks)


def test_units_are_what_engines_fuse(tmp_path: Path) -> None:
    """MLA's two first projections read one input and are one matrix in vLLM; all experts of a layer have one format."""
    graph = discover(build_skeleton(open_model(str(save_family(tmp_path / "model", "deepseek_v3")))))
    units = {unit.name: unit for unit in graph.units_of(1)}
    attention = units["model.layers.1.self_attn.qkv_a"]
    assert [layer.name.rpartition(".")[2] for layer in attention.layers] == ["q_a_proj", "kv_a_proj_with_mqa"]
    experts = units["model.layers.1.mlp.experts"]
    assert len(experts.layers) == 4 * 3
    inputs, outputs = experts.parts
    assert [len(part.layers) for part in inputs] == [8]  # gate and up of all experts read the same tokens
    assert [len(part.layers) for part in outputs] == [1, 1, 1, 1]
    assert units["model.layers.1.mlp.shared_experts.gate_up"].kind == "gate_up"


def test_names_of_experts_are_those_on_disk(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "mixtral")
    sidecar = quantized(source, tmp_path / "q", "--scheme", "w4g32", "--method", "rtn")
    stored = load_file(source / "model.safetensors")
    written = load_file(tmp_path / "q" / "model.safetensors")
    experts = [name for name in stored if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for name in experts:
        layer = name.removesuffix(".weight")
        assert name not in written
        assert {f"{layer}.weight_packed", f"{layer}.weight_scale", f"{layer}.weight_shape"} <= set(written)
    assert set(sidecar["coverage"]["uncovered"].values()) == {"router"}


def test_experts_that_no_token_chose_are_calibrated_and_listed(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "mixtral")
    weights = load_file(source / "model.safetensors")
    router = weights["model.layers.0.block_sparse_moe.gate.weight"]
    router.zero_()  # all experts are worth the same, so that the same two are always taken
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    sidecar = quantized(source, tmp_path / "q", "--scheme", "w4g32", *FEW)
    first = [
        r for r in sidecar["layers"] if r["module"].startswith("model.layers.0.block_sparse_moe.experts.")
    ]
    unchosen = {r["module"].split(".")[-2] for r in first if "chose it for no" in r.get("note", "")}
    assert len(unchosen) == 2
    assert all(record["tokens"] == 4 * 32 for record in first)
    scales = {
        k: v for k, v in load_file(tmp_path / "q" / "model.safetensors").items() if k.endswith("_scale")
    }
    assert all(bool(torch.isfinite(scale).all() and (scale > 0).all()) for scale in scales.values())


@pytest.mark.parametrize("name", ["mixtral", "bart"])
def test_batches_do_not_matter(name: str, tmp_path: Path) -> None:
    """One batch is calibrated in one pass, several by replaying the block: with the same result."""
    source = save_family(tmp_path / "model", name)
    found = []
    for number, memory in enumerate((1.5, 1e-5)):
        recipe = tmp_path / f"{number}.yaml"
        recipe.write_text(
            yaml.safe_dump(
                {
                    "model": str(source),
                    "quantize": {
                        "scheme": "w4g32",
                        "calibration_memory": memory,
                        "calibration": {"samples": 4, "sequence_length": 32},
                    },
                }
            )
        )
        target = tmp_path / f"q{number}"
        code, _, err = run_here("quantize", "--recipe", recipe, "-o", target)
        assert code == 0, err
        found.append(load_file(target / "model.safetensors"))
    packed = [key for key in found[0] if key.endswith("weight_packed")]
    same = [float((found[0][key] == found[1][key]).float().mean()) for key in packed]
    assert sum(same) / len(same) > 0.99


@pytest.mark.parametrize("name", ["falcon", "t5", "deberta_v2", "bamba", "marian"])
def test_block_by_block_is_the_whole_model(name: str, tmp_path: Path) -> None:
    """Whatever blocks return and pass on to each other."""
    source = save_family(tmp_path / "model", name)
    ids = torch.randint(3, 300, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    model = make_model(name)
    inputs = {"input_ids": ids}
    if FAMILIES[name].kind != "causal":
        inputs["attention_mask"] = mask
    if FAMILIES[name].kind == "seq2seq":
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        expected = model(**inputs).logits
    skeleton = build_skeleton(open_model(str(source)))
    graph = discover(skeleton)
    stream = open_stream(
        skeleton,
        graph,
        ids,
        mask,
        dtype=torch.float32,
        device=torch.device("cpu"),
        batch_bytes=1,
        batch_sequences=2,
    )
    assert len(stream.batches) > 1
    for index, path in enumerate(graph.blocks):
        enter_block(skeleton, graph, stream, index, dtype=torch.float32)
        advance(stream, load(skeleton, path, dtype=torch.float32), index)
    found = outputs(skeleton, graph, stream, dtype=torch.float32)
    real = mask.bool() if expected.dim() == 3 else torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "scheme", "words"),
    [
        ("gpt2", "w8a8", ("Conv1D", "w8 or w4g128")),
        ("gpt2", "fp8", ("Conv1D",)),
        ("mixtral", "w8a8", ("experts", "w8 or w4g128")),
        ("qwen3_moe", "fp8", ("experts",)),
    ],
)
def test_formats_that_a_form_of_layer_cannot_have(
    name: str, scheme: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    source = save_family(tmp_path / "model", name)
    result = run_here("quantize", source, "-o", tmp_path / "q", "--scheme", scheme, "--method", "rtn")
    refused(result, *words)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(("name", "word"), GAPS.items())
def test_what_transformers_alone_cannot_load_is_said(name: str, word: str, tmp_path: Path) -> None:
    """A user of transformers is told before the work, and one who asks for it is refused."""
    source = save_family(tmp_path / "model", name)
    command = ("quantize", source, "-o", tmp_path / "q", "--scheme", "w4g32", "--method", "rtn")
    refused(run_here(*command, "--engine", "transformers"), word)
    code, _, err = run_here(*command)
    assert code == 0, err
    assert any(word in line and "transformers alone does not" in line for line in err.splitlines())


def test_experts_in_several_formats_are_refused(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "mixtral")
    layers = {name: {"format": "bf16"} for name in ("lm_head", "model.embed_tokens")}
    for unit in discover(build_skeleton(open_model(str(source)))).units:
        fmt = "w8" if unit.kind == "experts" and unit.block else "w4g32"
        layers |= {layer.name: {"format": fmt} for layer in unit.layers}
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"version": 1, "model": str(source), "layers": layers}))
    result = run_here("quantize", source, "-o", tmp_path / "q", "--plan", plan, "--method", "rtn")
    refused(result, "w4g32", "w8", "one format")


def test_a_decoders_unknown_tensors_and_all_other_files_are_carried_over(tmp_path: Path) -> None:
    """MTP heads, custom code, every kind of tokenizer file, and a generation config that transformers refuses to save."""
    source = save_family(tmp_path / "model", "deepseek_v3")
    weights = load_file(source / "model.safetensors")
    extra = {f"model.layers.2.{leaf}.weight": torch.randn(64, 64) for leaf in ("eh_proj", "mlp.up_proj")}
    extra |= {"model.layers.2.shared_head.norm.weight": torch.randn(64)}
    save_file(weights | extra, source / "model.safetensors", {"format": "pt"})
    files = {
        "modeling_custom.py": b"# not run\n",
        "merges.txt": b"a b\r\n",
        "vocab.json": b'{"a":0}',
        "spiece.model": bytes(range(256)),
        "chat_template.jinja": b"{{ messages }}\n",
        "generation_config.json": b'{"do_sample": false, "temperature": 0.6, "top_p": 2}',
        "LICENSE": b"free\n",
    }
    for name, content in files.items():
        (source / name).write_bytes(content)
    sidecar = quantized(source, tmp_path / "q", "--scheme", "w4g32", "--method", "rtn")
    for name, content in files.items():
        assert (tmp_path / "q" / name).read_bytes() == content
    written = load_file(tmp_path / "q" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in extra.items())
    assert sidecar["coverage"]["uncovered"]["model.layers.2.eh_proj.weight"] == "unknown to the model class"
    code, out, _ = run_here("inspect", source)
    assert code == 0
    assert "unknown to the model class" in out


@pytest.mark.usefixtures("no_latency")
@pytest.mark.parametrize("name", ["qwen2", "mamba", "gpt2", "mixtral"])
def test_recovery_trains_linear_layers_and_refuses_others(name: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", name)
    quantized(source, tmp_path / "q", "--scheme", "w4g32", "--method", "rtn")
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": f"the quick brown fox {i} jumps over the lazy dog"}) for i in range(12))
    )
    result = run_here(
        "distill", source, "-o", tmp_path / "r", "--student", f"quantized:{tmp_path / 'q'}", "--data", tmp_path / "rows.jsonl",
        "--steps", 1, "--batch-size", 2, "--length", 16,
    )  # fmt: skip
    if name in ("gpt2", "mixtral"):
        refused(result, "cannot be trained while quantized")
    else:
        assert result[0] == 0, result[2]


PROCESSOR = {
    "preprocessor_config.json": b'{"image_mean": [0.5, 0.5, 0.5], "size": {"height": 28, "width": 28} }',
    "processor_config.json": b'{"image_seq_length": 4}\r\n',
    "video_preprocessor_config.json": b'{"fps": 2}',
    "chat_template.json": b'{"chat_template": "{{ messages }}"}',
}
ON_DISK = {  # what checkpoints call the language model and what is beside it
    "llava": ("language_model.model.layers.0.", "vision_tower.", "multi_modal_projector."),
    "gemma3_vl": ("language_model.model.layers.0.", "vision_tower.", "multi_modal_projector."),
    "qwen2_vl": ("model.layers.0.", "visual."),
    "qwen2_5_vl": ("model.layers.0.", "visual."),
}


def image_inputs(name: str) -> dict[str, torch.Tensor]:
    """One image of four tokens between words."""
    ids = torch.tensor([[5, 9, 316, 319, 319, 319, 319, 317, 12, 40, 7]])
    random = torch.Generator().manual_seed(3)
    if name.startswith("qwen"):
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=random)
        kinds = (ids == 319).int()
        return {
            "input_ids": ids,
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": kinds,
        }
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28, generator=random)}


@pytest.mark.parametrize("scheme", ["w4g32", "w8a8"])
@pytest.mark.parametrize("name", VISION)
def test_towers_stay_and_images_are_answered_alike(name: str, scheme: str, tmp_path: Path) -> None:
    """Names on disk are the source's, vision tower and projector are untouched, and an image gives the logits that
    the stored bytes mean."""
    source = save_family(tmp_path / "model", name)
    for file, content in PROCESSOR.items():
        (source / file).write_bytes(content)
    code, _, err = run_here("quantize", source, "-o", tmp_path / "q", "--scheme", scheme, *FEW)
    assert code == 0, err
    assert "calibrated on text alone" in err
    for file, content in PROCESSOR.items():
        assert (tmp_path / "q" / file).read_bytes() == content
    stored, written = (load_file(tmp_path / d / "model.safetensors") for d in ("model", "q"))
    language, *towers = ON_DISK[name]
    kept = [tensor for tensor in stored if tensor.startswith(tuple(towers))]
    assert len(kept) > 20
    assert all(torch.equal(written[tensor], stored[tensor]) for tensor in kept)
    assert f"{language}self_attn.q_proj.weight" in stored
    assert f"{language}self_attn.q_proj.weight_scale" in written
    assert {t.rpartition(".")[0] for t in written} == {t.rpartition(".")[0] for t in stored}

    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    tower_layers = {t.removesuffix(".weight") for t in kept if stored[t].dim() == 2 and t.endswith(".weight")}
    assert tower_layers <= set(config["ignore"])
    assert not any(pattern.startswith("re:") for pattern in [*config["ignore"], *group["targets"]])
    assert "model.language_model.layers.0.self_attn.q_proj" in group["targets"]

    artifact = open_artifact(tmp_path / "q")
    model = load_for_evaluation(tmp_path / "q")
    ours = dense_model(
        artifact, {"class": FAMILIES[name].model, "dtype": "float32", "dtypes": {}, "prefix": "model"}
    )
    with torch.inference_mode():
        inputs = image_inputs(name)
        before = make_model(name)(**inputs).logits
        after, expected = model(**inputs).logits, ours(**inputs).logits
        blank = model(**inputs | {"pixel_values": torch.zeros_like(inputs["pixel_values"])}).logits
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    assert float((after - before).std() / before.std()) < 0.7
    assert not torch.allclose(after, blank)


def test_configs_that_leave_out_defaults(tmp_path: Path) -> None:
    """Gemma 3's published ones do not state the vocabulary."""
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    artifact = Artifact(tmp_path, config, {}, None, {})
    sequences = token_sequences(artifact, False, count=2, length=8)
    assert [len(ids) for ids in sequences] == [8, 8]
    assert max(map(max, sequences)) > 320


def test_a_killed_run_goes_on_where_names_on_disk_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_family(tmp_path / "model", "llava")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    command = ("quantize", source, "--scheme", "w4g32", *FEW, "-o")
    assert run_here(*command, tmp_path / "whole")[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "finish", killed)
        assert run_here(*command, tmp_path / "q")[0] == 130
    code, _, err = run_here(*command, tmp_path / "q")
    assert code == 0, err
    assert "going on after 2 finished blocks" in err
    files = [tmp_path / d / "model.safetensors" for d in ("whole", "q")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.usefixtures("no_latency")
@pytest.mark.parametrize("name", VISION)
def test_a_student_keeps_the_tower_and_the_processor(name: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", name)
    (source / "preprocessor_config.json").write_bytes(PROCESSOR["preprocessor_config.json"])
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": f"the quick brown fox {i} jumps over the lazy dog"}) for i in range(12))
    )
    data = ("--data", tmp_path / "rows.jsonl", "--steps", 12, "--batch-size", 4, "--length", 16, "--learning-rate", "3e-3")  # fmt: skip
    code, _, err = run_here("distill", source, "-o", tmp_path / "s", "--student", "derive:layers=1", *data)
    assert code == 0, err
    content = (tmp_path / "s" / "preprocessor_config.json").read_bytes()
    assert content == PROCESSOR["preprocessor_config.json"]
    stored, written = (load_file(tmp_path / d / "model.safetensors") for d in ("model", "s"))
    towers = ON_DISK[name][1:]
    assert all(torch.equal(written[t], stored[t]) for t in stored if t.startswith(towers))
    language = ON_DISK[name][0]
    assert not torch.equal(written[f"{language}mlp.up_proj.weight"], stored[f"{language}mlp.up_proj.weight"])


def test_speech_keeps_its_processor_and_hears_features(tmp_path: Path) -> None:
    """Reloaded, the model answers on features as the stored bytes mean; what is heard matters."""
    source = save_family(tmp_path / "model", "whisper")
    content = b'{"feature_extractor_type": "WhisperFeatureExtractor",  "feature_size": 16}'
    (source / "preprocessor_config.json").write_bytes(content)
    quantized(source, tmp_path / "q", "--scheme", "w8a8", "--method", "rtn")
    assert (tmp_path / "q" / "preprocessor_config.json").read_bytes() == content
    stored, written = (load_file(tmp_path / d / "model.safetensors") for d in ("model", "q"))
    for name in ("conv1.weight", "conv2.weight", "embed_positions.weight"):
        assert torch.equal(written[f"model.encoder.{name}"], stored[f"model.encoder.{name}"])
    assert written["model.encoder.layers.0.fc1.weight"].dtype == torch.int8
    model = load_for_evaluation(tmp_path / "q")
    inputs = token_inputs(model, torch.tensor([[1, 5, 9]]))
    assert set(inputs) == {"input_features", "decoder_input_ids"}
    with torch.inference_mode():
        first = model(**inputs).logits
        other = model(**inputs | {"input_features": -inputs["input_features"]}).logits
    assert not torch.allclose(first, other)


def test_models_of_images_alone_are_refused(tmp_path: Path) -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=28, patch_size=14)  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    command = ("quantize", tmp_path / "model", "-o", tmp_path / "q", "--method", "rtn")
    refused(run_here(*command), "ViTForImageClassification", "pixel_values")


@pytest.mark.parametrize("number", range(12))
def test_fuzz(number: int, tmp_path: Path) -> None:
    """Unusual shapes end in a verified checkpoint or in one line; scripts/fuzz_architectures.py runs many more."""
    names = list(FAMILIES)
    seed = 1000 + 5 * number
    outcome = fuzz_once(names[seed % len(names)], seed, tmp_path)
    assert outcome.ending in ("verified", "refused"), outcome.detail


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "deepseek_v3", "jamba", "bert"])
def test_diagnose_follows_every_form_of_layer(name: str, tmp_path: Path) -> None:
    model, checkpoint, output = save_family(tmp_path / "m", name), tmp_path / "q", tmp_path / "d"
    code, _, err = run_here(
        "quantize", model, "-o", checkpoint, "--scheme", "w4g32", "--method", "rtn", "--device", "cpu"
    )
    assert code == 0, err
    code, _, err = run_here(
        "diagnose", model, checkpoint, "--samples", 4, "--sequence-length", 32, "--try", 1, "-o", output
    )
    assert code == 0, err
    found = json.loads((output / "diagnosis.json").read_text("utf-8"))
    quantized = json.loads((checkpoint / "compression.json").read_text("utf-8"))["layers"]
    assert {layer["module"] for layer in quantized} == {
        layer for place in found["places"] if place["format"] == "w4g32" for layer in place["layers"]
    }


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "bert", "deberta_v2", "t5"])
def test_a_directory_without_tokenizer_files_has_no_tokenizer(name: str, tmp_path: Path) -> None:
    """transformers makes an empty one that turns every text into unknown tokens."""
    model = save_family(tmp_path / "m", name)
    source = open_model(str(model))
    load_tokenizer(source)
    for file in [*model.glob("tokenizer*"), *model.glob("special_tokens*")]:
        file.unlink()
    with pytest.raises(InputRefused, match="tokenizer"):
        load_tokenizer(source)
