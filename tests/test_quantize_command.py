"""``compressor quantize`` as a user meets it: the artifact, the one-line errors, the exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MakeLlama, Run, make_tokenizer
from safetensors.torch import load_file, save_file

FAST = ("--method", "rtn", "--scheme", "w4g32")


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()
    }


def refused(result: tuple[int, str, str], code: int, output: Path, *words: str) -> None:
    """One line on standard error with all ``words``, the exit code, and nothing at the output path or beside it."""
    got, _, stderr = result
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert got == code, stderr
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    for word in words:
        assert word in lines[0], lines[0]
    assert not output.exists()
    assert not list(output.parent.glob(f".{output.name}*"))


_EVERY_SCHEME = [(scheme, "rtn") for scheme in ("w4g32", "w4", "w8", "w8g64", "w8a8", "fp8")]


@pytest.mark.parametrize(
    ("scheme", "method"), [*_EVERY_SCHEME, ("w4g32", "gptq"), ("w8a8", "gptq"), ("fp8", "gptq")]
)
def test_every_scheme_ends_in_a_verified_checkpoint(
    run: Run, tiny_llama_dir: Path, tmp_path: Path, scheme: str, method: str
) -> None:
    code, stdout, stderr = run(
        "quantize", tiny_llama_dir, "-o", tmp_path / "q", "--scheme", scheme, "--method", method,
        "--samples", 4, "--sequence-length", 32, "--json",
    )  # fmt: skip
    assert code == 0, stderr
    answer = json.loads(stdout)
    assert answer["coverage"] == 1.0
    assert all(check["passed"] for check in answer["checks"])
    sidecar = json.loads((tmp_path / "q" / "compression.json").read_text())
    rounded = [record for record in sidecar["layers"] if record["method"] == "gptq"]
    assert len(rounded) == (14 if method == "gptq" and scheme != "fp8" else 0)
    for record in rounded:
        assert record["error"] <= record["error_rtn"]


def test_two_runs_give_the_same_bytes(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        code, _, stderr = run(
            "quantize", tiny_llama_dir, "-o", tmp_path / name, "--samples", 4, "--sequence-length", 32
        )
        assert code == 0, stderr
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_bfloat16_untied_and_sharded_sources(run: Run, make_llama: MakeLlama, tmp_path: Path) -> None:
    source = make_llama(dtype=torch.bfloat16, tie_word_embeddings=False)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: weights[n] for n in part}, source / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f for f, part in parts.items() for n in part}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    code, _, stderr = run("quantize", source, "-o", tmp_path / "q", *FAST)
    assert code == 0, stderr
    written = load_file(tmp_path / "q" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], weights["lm_head.weight"])
    assert written["model.norm.weight"].dtype == torch.bfloat16


def test_group_size_falls_back_and_says_so_unless_strict(
    run: Run, make_llama: MakeLlama, tmp_path: Path
) -> None:
    source = make_llama(hidden_size=96, intermediate_size=128)
    code, _, stderr = run("quantize", source, "-o", tmp_path / "q", "--scheme", "w4g128", "--method", "rtn")
    assert code == 0, stderr
    assert "96 inputs: w4g128 does not divide them" in stderr
    plan = json.loads((tmp_path / "q" / "compression.json").read_text())["plan"]["layers"]
    assert plan["model.layers.0.mlp.down_proj"]["format"] == "w4g128"
    assert plan["model.layers.0.self_attn.q_proj"]["format"] == "w4g32"
    out = tmp_path / "strict"
    refused(
        run("quantize", source, "-o", out, "--scheme", "w4g128", "--strict"), 5, out,
        "model.layers.0.self_attn.q_proj (96 inputs)", "--strict",
    )  # fmt: skip


def test_ignore_and_include(run: Run, make_llama: MakeLlama, tiny_llama_dir: Path, tmp_path: Path) -> None:
    untied = make_llama(tie_word_embeddings=False)
    code, _, stderr = run(
        "quantize", untied, "-o", tmp_path / "q", *FAST,
        "--ignore", "model.layers.0.*", "--ignore", r"re:1\.mlp\.down", "--include", "lm_head",
    )  # fmt: skip
    assert code == 0, stderr
    plan = json.loads((tmp_path / "q" / "compression.json").read_text())["plan"]["layers"]
    chosen = {name for name, assignment in plan.items() if assignment["format"] == "w4g32"}
    attention = {f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"}
    assert chosen == attention | {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "lm_head"}
    out = tmp_path / "x"
    refused(
        run("quantize", untied, "-o", out, *FAST, "--ignore", "model.layerz.*"),
        2,
        out,
        "--ignore",
        "matches no layer",
    )
    refused(
        run("quantize", untied, "-o", out, *FAST, "--ignore", "*.q_proj"), 2, out, "fuse them into one matrix"
    )
    refused(
        run("quantize", untied, "-o", out, *FAST, "--include", "model.embed_tokens"),
        5,
        out,
        "only linear layers",
    )
    refused(
        run("quantize", tiny_llama_dir, "-o", out, *FAST, "--include", "lm_head"),
        5,
        out,
        "tied embeddings",
        "model.embed_tokens",
    )


def copy_of(directory: Path, target: Path) -> Path:
    shutil.copytree(directory, target)
    return target


def test_broken_sources_are_refused_in_one_line(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"

    def check(name: str, damage: Callable[[Path], None], *words: str) -> None:
        broken = copy_of(tiny_llama_dir, tmp_path / name)
        damage(broken)
        refused(run("quantize", broken, "-o", out, *FAST), 5, out, *words)

    def rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
        def damage(directory: Path) -> None:
            weights = load_file(directory / "model.safetensors")
            change(weights)
            save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

        return damage

    def cut(directory: Path, keep: float) -> None:
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])

    def index(mapping: dict[str, str]) -> Callable[[Path], None]:
        return lambda d: (
            (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping})) and None
        )

    layer = "model.layers.1.mlp.up_proj.weight"
    check("missing", lambda d: (d / "model.safetensors").unlink(), "no model.safetensors")
    check("no-config", lambda d: (d / "config.json").unlink(), "no config.json")
    check("truncated", lambda d: cut(d, 0.6), "model.safetensors", "truncated")
    check("cut-header", lambda d: cut(d, 0.001), "model.safetensors", "truncated")
    check(
        "garbage", lambda d: (d / "model.safetensors").write_bytes(b"\0" * 999) and None, "model.safetensors"
    )
    check("outside", index({layer: "../model.safetensors"}), "index.json", "outside")
    check("no-shard", index({layer: "model-9.safetensors"}), "model-9.safetensors", "missing")
    check("nan", rewrite(lambda w: w[layer].__setitem__((3, 3), float("nan"))), layer, "1 inf or NaN")
    check("inf", rewrite(lambda w: w["model.norm.weight"].__setitem__(0, float("inf"))), "model.norm.weight")
    check("lost", rewrite(lambda w: w.__delitem__(layer)), layer)
    check("shape", rewrite(lambda w: w.__setitem__(layer, torch.zeros(3, 3))), layer, "[3, 3]")

    def unknown(d: Path) -> None:
        config = json.loads((d / "config.json").read_text())
        (d / "config.json").write_text(
            json.dumps(config | {"model_type": "nonesuch", "architectures": ["NoneSuch"]})
        )

    check("unknown", unknown, "config.json", "nonesuch")


def test_already_quantized_input_is_refused(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    assert run("quantize", tiny_llama_dir, "-o", tmp_path / "q", *FAST)[0] == 0
    out = tmp_path / "again"
    refused(run("quantize", tmp_path / "q", "-o", out, *FAST), 5, out, "already quantized")


def test_bad_usage(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    refused(run("quantize", tiny_llama_dir, "-o", out, "--scheme", "w4g48"), 2, out, "w4g48", "w4g32")
    refused(run("quantize", tiny_llama_dir, "-o", out, "--method", "magic"), 2, out, "method")
    refused(run("quantize", tmp_path / "nothing", "-o", out), 5, out, "no such file")
    refused(run("quantize", "-o", out), 2, out, "model")
    refused(run("quantize", tiny_llama_dir, "-o", out, *FAST, "--device", "warp"), 2, out, "warp")
    refused(
        run("quantize", tiny_llama_dir, "-o", out, "--sequence-length", 4096, "--data", "builtin"),
        2,
        out,
        "4096",
        "256",
    )
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: x\nquantize:\n  scheme: w4g32\n  shceme: w4g32\n")
    refused(run("quantize", "--recipe", recipe, "-o", out), 2, out, "r.yaml, line 4", "shceme", "unknown key")
    recipe.write_text("model: x\nquantize:\n  damping: fast\n")
    refused(run("quantize", "--recipe", recipe, "-o", out), 2, out, "line 3", "damping")
    recipe.write_text("model: [x\n")
    refused(run("quantize", "--recipe", recipe, "-o", out), 2, out, "r.yaml", "YAML")


def test_no_data_is_refused_before_the_model_is_opened(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n  \n")
    out = tmp_path / "q"
    refused(run("quantize", tmp_path / "no-model", "-o", out, "--data", empty), 5, out, "empty.txt")


def test_existing_output_is_kept_without_overwrite(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    code, _, stderr = run("quantize", tiny_llama_dir, "-o", out, *FAST)
    assert code == 2
    assert "already exists" in stderr
    assert files_of(out) == {"precious.txt": b"mine"}
    code, _, stderr = run("quantize", tiny_llama_dir, "-o", out, *FAST, "--overwrite")
    assert code == 2
    assert files_of(out) == {"precious.txt": b"mine"}  # not a checkpoint: not ours to replace
    assert run("quantize", tiny_llama_dir, "-o", tmp_path / "w", *FAST)[0] == 0
    before = files_of(tmp_path / "w")
    code, _, stderr = run(
        "quantize", tiny_llama_dir, "-o", tmp_path / "w", "--method", "rtn", "--scheme", "w8", "--overwrite"
    )
    assert code == 0, stderr
    assert files_of(tmp_path / "w") != before


@pytest.mark.parametrize(
    "special", [{"bos_token": "<s>", "eos_token": "</s>"}, {"pad_token": "<pad>", "bos_token": "<s>"}]
)
def test_tokenizers_without_pad_or_eos_work(
    run: Run, tiny_llama_dir: Path, tmp_path: Path, special: dict[str, str]
) -> None:
    source = copy_of(tiny_llama_dir, tmp_path / "source")
    make_tokenizer(**special).save_pretrained(source)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "the dog " * n}) + "\n" for n in range(3, 20)))
    code, _, stderr = run(
        "quantize",
        source,
        "-o",
        tmp_path / "q",
        "--scheme",
        "w4g32",
        "--data",
        rows,
        "--samples",
        8,
        "--sequence-length",
        16,
    )
    assert code == 0, stderr


def test_dry_run_writes_nothing_and_reports(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    code, stdout, stderr = run(
        "quantize", tiny_llama_dir, "-o", out, "--samples", 4, "--sequence-length", 32, "--dry-run", "--json"
    )
    assert code == 0, stderr
    answer = json.loads(stdout)
    assert answer["estimate"]["seconds"] > 0
    assert answer["estimate"]["disk_bytes"] > 0
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def start_process(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "compressor", *map(str, arguments)],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finished_blocks(journal: Path) -> int:
    return len(json.loads(journal.read_text())["blocks"]) if journal.exists() else 0


def test_killed_run_resumes_to_the_same_bytes(make_llama: MakeLlama, tmp_path: Path) -> None:
    source = make_llama(num_hidden_layers=12, hidden_size=128, intermediate_size=256)
    command = ["quantize", source, "--samples", 16, "--sequence-length", 128, "--scheme", "w4g32"]
    whole = start_process(*command, "-o", tmp_path / "whole")
    assert whole.wait(300) == 0, whole.stderr.read() if whole.stderr else ""
    for blocks in (1, 7):
        out = tmp_path / f"killed-{blocks}"
        victim = start_process(*command, "-o", out)
        journal = tmp_path / f".{out.name}.partial" / "journal.json"
        deadline = time.monotonic() + 200
        while finished_blocks(journal) < blocks and time.monotonic() < deadline and victim.poll() is None:
            time.sleep(0.005)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert not out.exists()
        assert journal.exists()
        again = start_process(*command, "-o", out)
        assert again.wait(300) == 0
        assert again.stderr is not None
        assert "going on after" in again.stderr.read()
        assert files_of(out) == files_of(tmp_path / "whole")
        assert not journal.exists()


def test_memory_does_not_grow_with_depth(make_llama: MakeLlama, tmp_path: Path) -> None:
    """A block here is 9 MB in fp32: 16 more of them would show."""
    peaks = {}
    for blocks in (2, 18):
        source = make_llama(num_hidden_layers=blocks, hidden_size=384, intermediate_size=1536)
        process = start_process(
            "quantize",
            source,
            "-o",
            tmp_path / str(blocks),
            "--samples",
            8,
            "--sequence-length",
            128,
            "--json",
        )
        stdout, stderr = process.communicate(timeout=400)
        assert process.returncode == 0, stderr
        peaks[blocks] = json.loads(stdout)["peak_memory_bytes"]
    assert peaks[18] < peaks[2] + 40e6


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small tmpfs needs root"
)
def test_full_disk_is_one_line_and_leaves_nothing(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True
    ).returncode:
        pytest.skip("this machine does not let tests mount a tmpfs")
    try:
        out = small / "q"
        refused(run("quantize", tiny_llama_dir, "-o", out, *FAST), 6, out, "needed", "free")
    finally:
        subprocess.run(["umount", small], check=True)


def test_help_does_not_wait_for_torch() -> None:
    heavy = ("torch", "transformers", "datasets", "scipy", "numpy", "compressed_tensors")
    code = f"import sys, compressor.cli.main; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("up", [False, True], ids=["onto itself", "onto its parent"])
def test_the_model_is_not_overwritten_and_that_is_seen_first(
    run: Run, tmp_path: Path, tiny_llama_dir: Path, up: bool
) -> None:
    source = copy_of(tiny_llama_dir, tmp_path / "models" / "tiny")
    before = {p: p.read_bytes() for p in source.iterdir()}
    target = source.parent if up else source
    for extra in ((), ("--dry-run",)):
        code, _, error = run("quantize", source, "--output", target, "--overwrite", *FAST, *extra)
        assert code == 2
        assert "the model itself is read from there" in error
        assert "quantizing" not in error
    assert {p: p.read_bytes() for p in source.iterdir()} == before


def test_a_missing_engine_is_seen_before_any_work(run: Run, tmp_path: Path, tiny_llama_dir: Path) -> None:
    source = tiny_llama_dir
    options = ("--verify-engine", "vllm", "--engine-python", tmp_path / "no-python")
    code, _, error = run("quantize", source, "--output", tmp_path / "out", *FAST, *options)
    assert code == 2
    assert "no-python" in error
    assert "quantizing" not in error
    assert not (tmp_path / "out").exists()
