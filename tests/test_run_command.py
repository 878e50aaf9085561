"""``compressor run``: what the run directory holds, what a second run does, gates, locks, and release files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Run, run_killed

from compressor.checkpoint.release import write_release
from compressor.reports.write import read_report

CARD = "---\nlicense: mit\nlanguage: en\npipeline_tag: text-generation\n---\n# The original\n"


@pytest.fixture
def model(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(tiny_llama_dir, tmp_path / "secret-place" / "tiny-model"))
    (copy / "README.md").write_text(CARD)
    return copy


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    text = tmp_path / "secret-place" / "text.txt"
    text.write_text("\n".join(f"the quick fox number {i} jumps over dog {i * 7 % 13}" for i in range(300)))
    return write(
        tmp_path / "recipe.yaml",
        {
            "model": str(model),
            "base_model": "someone/tiny",
            "device": "cpu",
            "quantize": {
                "scheme": "w4g32",
                "method": "gptq",
                "calibration": {"data": str(text), "samples": 4, "sequence_length": 32},
            },
            "verify": {"engine": None},
            "evaluate": {"data": str(text), "samples": 12, "sequence_length": 32, "generations": 2},
        },
    )


def write(file: Path, value: Any) -> Path:
    file.write_text(yaml.safe_dump(value))
    return file


def changed(recipe: Path, **sections: Any) -> Path:
    return write(recipe, {**yaml.safe_load(recipe.read_text()), **sections})


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()
    }


def test_a_run_leaves_a_release_that_says_nothing_of_the_machine(
    run: Run, recipe: Path, model: Path, tmp_path: Path
) -> None:
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 0, stderr
    checkpoint = tmp_path / "a" / "checkpoint"

    assert (checkpoint / "README.source.md").read_bytes() == CARD.encode(), "the source's card is kept"
    card = (checkpoint / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["base_model"] == "someone/tiny"
    assert metadata["base_model_relation"] == "quantized"
    assert metadata["library_name"] == "transformers"
    assert (metadata["license"], metadata["pipeline_tag"]) == ("mit", "text-generation")
    report = read_report(tmp_path / "a")
    assert report.evaluation is not None
    (result,) = metadata["model-index"][0]["results"]
    measured = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert measured["kl"] == report.evaluation.metrics["kl"].compressed.value
    assert "perplexity" in measured

    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=checkpoint, check=True)
    statement = json.loads((checkpoint / "provenance.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {subject["name"] for subject in statement["subject"]}
    assert {"model.safetensors", "config.json", "README.md", "tokenizer.json"} <= subjects
    names = {item["name"] for item in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert names == {"tiny-model/model.safetensors", "calibration data text.txt"}
    for name in ("README.md", "provenance.json", "SHA256SUMS"):
        assert "secret-place" not in (checkpoint / name).read_text(), name

    code, _, stderr = run("verify", checkpoint, "--source", model)
    assert code == 0, stderr
    with (checkpoint / "README.md").open("a") as stream:
        stream.write("better than the original")
    code, _, stderr = run("verify", checkpoint, "--source", model)
    assert code == 4
    assert "README.md: its bytes are not those in SHA256SUMS" in stderr

    # Samples to read side by side.
    assert len(report.evaluation.generations) == 2
    first = report.evaluation.generations[0]
    assert first.baseline is not None
    assert first.same_tokens is not None
    assert 0 <= first.same_tokens <= first.new_tokens <= 32


def test_a_lock_repeats_the_run_and_notices_other_inputs(
    run: Run, recipe: Path, model: Path, tmp_path: Path
) -> None:
    assert run("run", recipe, "-o", tmp_path / "a")[0] == 0
    lock = tmp_path / "a" / "recipe.lock.yaml"
    locked = yaml.safe_load(lock.read_text())
    assert locked["quantize"]["damping"] == 0.01, "defaults are filled in"
    assert set(locked["locked"]["inputs"]) == {"model", "quantize.calibration.data", "evaluate.data"}
    assert locked["locked"]["versions"]["torch"]
    code, _, stderr = run("run", lock, "-o", tmp_path / "b")
    assert code == 0, stderr
    assert files_of(tmp_path / "a" / "checkpoint") == files_of(tmp_path / "b" / "checkpoint")
    (model / "generation_config.json").write_text("{}")
    code, _, stderr = run("run", lock, "-o", tmp_path / "c")
    assert code == 5
    assert "model: its content is not that of the lock" in stderr
    assert not (tmp_path / "c").exists()


def test_a_failed_gate_keeps_and_marks_the_artifact(run: Run, recipe: Path, tmp_path: Path) -> None:
    changed(recipe, gate={"max_kl": 1e-6, "max_bytes": "1MB"})
    for _ in range(2):  # the second time from the record
        code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
        assert code == 3
        assert "max_kl: KL(original ‖ compressed) is " in stderr
        assert "at most 1.0e-06 nats/token is asked for" in stderr
    assert "quantize: done before" in stderr
    assert "The release gate **failed**" in (tmp_path / "a" / "checkpoint" / "README.md").read_text()
    assert "**GATE FAILED**" in (tmp_path / "a" / "report.md").read_text()
    assert "gate failed: 1 of 2" in (tmp_path / "a" / "report.html").read_text()
    changed(recipe, gate={"max_kl": 100})
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 0, stderr
    assert "evaluate: done before" in stderr
    assert "report: done again, gate.max_kl has changed" in stderr
    assert "The release gate passed" in (tmp_path / "a" / "checkpoint" / "README.md").read_text()
    assert run("verify", tmp_path / "a" / "checkpoint")[0] == 0, "the sums follow the card"


def test_steps_are_done_again_from_where_it_was_asked(run: Run, recipe: Path, tmp_path: Path) -> None:
    assert run("run", recipe, "-o", tmp_path / "a")[0] == 0
    before = files_of(tmp_path / "a" / "checkpoint")
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a", "--from", "evaluate")
    assert code == 0, stderr
    assert "quantize: done before" in stderr
    assert "evaluate: done before" not in stderr
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a", "--from", "quantize")
    assert code == 0, stderr
    assert "done before" not in stderr
    assert files_of(tmp_path / "a" / "checkpoint") == before
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a", "--from", "scan")
    assert code == 2
    assert "the steps of this recipe are quantize, evaluate, report" in stderr
    shutil.rmtree(tmp_path / "a" / "checkpoint")
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 0, stderr
    assert files_of(tmp_path / "a" / "checkpoint") == before, "what is gone is made again"


def test_what_others_put_there_is_not_replaced(run: Run, recipe: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "a" / "checkpoint")
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 2
    assert "no run of this directory made it" in stderr
    assert (tmp_path / "a" / "checkpoint" / "README.md").read_text() == CARD
    (tmp_path / "a" / "run.json").write_text("{}")
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 5
    assert "run.json: not the record of a run" in stderr
    assert run("run", recipe, "-o", tmp_path / "a", "--overwrite")[0] == 0


def test_impossible_evaluations_are_seen_before_work(run: Run, recipe: Path, tmp_path: Path) -> None:
    value = yaml.safe_load(recipe.read_text())
    changed(recipe, evaluate={**value["evaluate"], "sequence_length": 4096})
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 2
    assert "evaluate.sequence_length: 4096 is more than" in stderr
    assert not (tmp_path / "a").exists()


def test_a_run_killed_at_any_file_ends_in_the_same_bytes(run: Run, recipe: Path, tmp_path: Path) -> None:
    """Killed just before and just after each rename that puts something in place, until none is left."""
    value = yaml.safe_load(recipe.read_text())
    data = {**value["quantize"]["calibration"]}
    changed(
        recipe,
        scan={"formats": ["w4g32", "w8", "bf16"], "data": data},
        plan={"budget": "6bits"},
        gate={"max_kl": 100},
    )
    output = tmp_path / "a"
    assert run("run", recipe, "-o", output)[0] == 0
    whole = files_of(output / "checkpoint")
    shutil.rmtree(output)
    # Each process is killed a little later than it got before, so the last ones die in the last steps.
    killed, _ = run_killed([str(n) for n in range(1, 30)], "run", recipe, "-o", output)
    assert killed >= 10
    assert files_of(output / "checkpoint") == whole
    assert read_report(output).gate is not None


def test_a_speedup_is_asked_for_where_the_run_times_the_checkpoint(
    run: Run, recipe: Path, tmp_path: Path
) -> None:
    value = yaml.safe_load(recipe.read_text())
    changed(recipe, gate={"min_speedup": 0.01})
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 2
    assert "gate.min_speedup: nothing is timed: give the recipe evaluate.latency" in stderr

    latency = {"prompt_length": 8, "new_tokens": 3, "rounds": 8, "warmup": 1, "leak_runs": 0}
    changed(recipe, evaluate={**value["evaluate"], "latency": {**latency, "prompt_length": 4096}})
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 2
    assert "evaluate.latency: --prompt-length 4096" in stderr
    assert not (tmp_path / "a").exists(), "seen before any work"

    changed(recipe, evaluate={**value["evaluate"], "latency": latency})
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 0, stderr
    report = read_report(tmp_path / "a")
    assert report.speed is not None
    assert report.speed.rounds == 8
    assert report.gate is not None
    assert [result.name for result in report.gate.results] == ["min_speedup"]
    assert report.gate.results[0].value == report.speed.decode_speedup
    assert "in decoding" in (tmp_path / "a" / "report.html").read_text()

    changed(recipe, gate={"min_speedup": 1e6})
    code, _, stderr = run("run", recipe, "-o", tmp_path / "a")
    assert code == 3
    assert "speed: done before" in stderr
    assert "min_speedup: speed-up over the original is " in stderr
    assert run("run", recipe, "-o", tmp_path / "a", "--from", "speed")[0] == 3
    assert read_report(tmp_path / "a").speed != report.speed


def test_a_signed_checkpoint_is_the_signers_and_whole(
    run: Run, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, public, other = (tmp_path / f"{name}.pem" for name in ("key", "public", "other"))
    for file in (key, other):
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", file)
    openssl("ec", "-in", key, "-pubout", "-out", public)
    openssl("ec", "-in", other, "-pubout", "-out", other)

    code, _, stderr = run("run", recipe, "-o", tmp_path / "a", "--signing-key", recipe)
    assert code == 5
    assert "recipe.yaml: not an elliptic-curve private key" in stderr
    assert not (tmp_path / "a").exists(), "seen before any work"

    code, _, stderr = run("run", recipe, "-o", tmp_path / "a", "--signing-key", key)
    assert code == 0, stderr
    checkpoint = tmp_path / "a" / "checkpoint"
    assert {f.name for f in checkpoint.iterdir()} >= {"model.sig", "SHA256SUMS"}
    assert not [f for f in (tmp_path / "a").iterdir() if f.name.startswith(".")]
    assert run("verify", checkpoint)[0] == 0
    code, printed, _ = run("verify", checkpoint, "--public-key", public, "--json")
    assert code == 0
    assert "holds for public.pem" in printed
    code, _, stderr = run("verify", checkpoint, "--public-key", other)
    assert code == 4
    assert "model.sig: does not hold for other.pem" in stderr
    upstream = ["verify", "key", checkpoint, "--signature", checkpoint / "model.sig", "--public_key", public]
    subprocess.run([sys.executable, "-m", "model_signing", *map(str, upstream)], check=True)

    # Sums that fit the changed files are made in a moment; a signature is not.
    (checkpoint / "README.md").write_text("better than the original")
    (checkpoint / "model.sig").rename(tmp_path / "model.sig")
    write_release(checkpoint)
    code, _, stderr = run("verify", checkpoint, "--public-key", public)
    assert code == 4
    assert "no model.sig" in stderr
    (tmp_path / "model.sig").rename(checkpoint / "model.sig")
    assert run("verify", checkpoint)[0] == 0
    code, _, stderr = run("verify", checkpoint, "--public-key", public)
    assert code == 4
    assert "Hash mismatch for 'README.md'" in stderr

    monkeypatch.setitem(sys.modules, "model_signing", None)
    code, _, stderr = run("run", recipe, "-o", tmp_path / "b", "--signing-key", key)
    assert code == 6
    assert "pip install model-signing" in stderr


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def test_nothing_evaluated_and_no_device_named(run: Run, recipe: Path, tmp_path: Path) -> None:
    """Classifiers are run like this: their report still says where it was made."""
    settings = yaml.safe_load(recipe.read_text()) | {"evaluate": None, "device": "auto"}
    code, _, err = run("run", write(recipe, settings), "-o", tmp_path / "out")
    assert code == 0, err
    assert read_report(tmp_path / "out").tool.environment.device_name
