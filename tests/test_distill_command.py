"""``compressor distill`` as a user meets it: artifact, report, cache, gates, refusals."""

import csv
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification
from typer.testing import CliRunner

from compressor.cli.main import app
from compressor.distillation import run as run_module
from compressor.distillation.latency import Latency
from compressor.errors import GateFailed, InputRefused, UsageError
from compressor.reports.write import read_report

MakeLlama = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_fresh_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Timing has a test of its own; elsewhere it would only cost time."""
    if "real_latency" not in request.keywords:
        fake = Latency(1, 1, 1.0, 1.0, 1000.0, 1, "cpu", "float32", 1, 0.01)
        monkeypatch.setattr(run_module, "measure_latency", lambda *a, **k: fake)


def distill(*arguments: str) -> None:
    result = CliRunner().invoke(app, ["distill", *arguments], standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def teacher(make_llama: MakeLlama) -> Path:
    return make_llama(seed=5, num_hidden_layers=4)


def common(teacher: Path, output: Path) -> list[str]:
    return [
        str(teacher), "-o", str(output), "--student", "derive:layers=2", "--data", "builtin:train", "--samples", "40",
        "--length", "32", "--steps", "6", "--batch-size", "4", "--micro-batch", "2", "--device", "cpu", "--track", "none",
    ]  # fmt: skip


def test_a_derived_student_with_its_report(make_llama: MakeLlama, tmp_path: Path) -> None:
    teacher = make_llama(seed=5, num_hidden_layers=4, dtype=torch.bfloat16)
    output = tmp_path / "student"
    distill(*common(teacher, output), "--control", "--lr", "1e-3")
    assert not list(tmp_path.glob(".student*"))
    student = AutoModelForCausalLM.from_pretrained(output)
    assert student.config.num_hidden_layers == 2
    assert student.config.use_cache
    assert AutoTokenizer.from_pretrained(output)("fox")["input_ids"]
    assert set(load_file(output / "model.safetensors")) <= set(student.state_dict())
    dtypes = {str(value.dtype) for value in load_file(output / "model.safetensors").values()}
    assert dtypes == {f"torch.{json.loads((output / 'config.json').read_text())['dtype']}"}
    assert json.loads((output / "derive.json").read_text())["layers"] == {"model.layers": [0, 3]}

    report = read_report(output)
    found = report.distillation
    assert found is not None
    assert set(found.arms) == {"teacher", "before", "after", "control"}
    assert found.arms["teacher"].metrics["kl"].value == pytest.approx(0, abs=1e-6)
    assert found.arms["after"].metrics["kl"].value < found.arms["before"].metrics["kl"].value
    assert found.arms["after"].parameters == sum(p.numel() for p in student.parameters())
    assert found.curve[0].step == 0
    assert found.curve[-1].step == found.steps == 6
    assert len(found.control_curve) == len(found.curve)
    assert found.gain_over_control is not None
    text = (output / "report.md").read_text()
    assert "control (labels only)" in text
    assert "Learning curve" in text
    page = (output / "report.html").read_text()
    assert 'id="curve-' in page
    assert "control (labels only)" in page
    assert found.speedup is not None
    assert found.speedup.low is not None
    assert found.speedup.low < found.speedup.value == 1


def test_cached_equals_live(teacher: Path, tmp_path: Path) -> None:
    """With all ids in the top k the cached targets are the live ones, up to the rounding of what is stored."""
    cache = tmp_path / "cache"
    distill(*common(teacher, tmp_path / "live"))
    distill(*common(teacher, tmp_path / "cached"), "--cache", str(cache), "--cache-targets", "topk:4096")
    live, cached = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "cached"))
    moved = load_file(teacher / "model.safetensors")
    for name, value in live.items():
        torch.testing.assert_close(value, cached[name], rtol=1e-2, atol=2e-4, msg=name)
    assert any(not torch.equal(live[n], moved[n]) for n in live if n in moved)

    with pytest.raises(InputRefused, match=r"stale: its targets is topk:4096 and this run's is rs:8"):
        distill(*common(teacher, tmp_path / "x"), "--cache", str(cache), "--cache-targets", "rs:8")
    with pytest.raises(InputRefused, match=r"stale: its temperature is 1\.0 and this run's is 2\.0"):
        distill(
            *common(teacher, tmp_path / "x"),
            "--cache",
            str(cache),
            "--cache-targets",
            "topk:4096",
            "--temperature",
            "2",
        )
    with pytest.raises(InputRefused, match="stale: its data"):
        distill(
            *common(teacher, tmp_path / "x"),
            "--cache",
            str(cache),
            "--cache-targets",
            "topk:4096",
            "--samples",
            "30",
        )
    with pytest.raises(UsageError, match="needs the whole distribution"):
        distill(*common(teacher, tmp_path / "x"), "--cache", str(cache), "--divergence", "rkl")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("how", ["replicated", "sharded"])
def test_two_processes_end_where_one_does(teacher: Path, tmp_path: Path, how: str) -> None:
    """The same steps over the same examples, with whole copies of the student (DDP) and with parts of it (FSDP2);
    under a time budget both processes stop together."""
    program = (
        ["-m", "compressor"] if how == "replicated" else [str(Path(__file__).with_name("sharded_run.py"))]
    )

    def launch(output: Path, *more: str) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
            *program, "distill", *common(teacher, output), *more,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    distill(*common(teacher, tmp_path / "one"))
    launch(tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-2, atol=2e-4, msg=name)
    if how == "replicated":
        launch(tmp_path / "timed", "--steps", "100000", "--time-budget", "1s")
        assert read_report(tmp_path / "timed").distillation is not None


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("targets", ["topk:8", "rs:16"])
def test_cache_only_resumes_and_a_damaged_shard_is_made_again(
    teacher: Path, tmp_path: Path, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compressor.distillation import cache as cache_module

    monkeypatch.setattr(cache_module, "SHARD_BYTES", 8 << 10)
    cache = tmp_path / "cache"
    arguments = [a for a in common(teacher, tmp_path / "unused") if a not in ("-o", str(tmp_path / "unused"))]
    distill(*arguments, "--cache", str(cache), "--cache-targets", targets, "--cache-only")
    shards = sorted(cache.glob("*.safetensors"))
    assert len(shards) > 2
    before = {file.name: file.read_bytes() for file in shards}
    untouched = shards[0].stat().st_mtime_ns
    shards[-1].write_bytes(b"broken")
    shards[1].unlink()
    distill(*arguments, "--cache", str(cache), "--cache-targets", targets, "--cache-only")
    assert {file.name: file.read_bytes() for file in shards} == before
    assert shards[0].stat().st_mtime_ns == untouched


def test_identical_student_has_no_loss(teacher: Path, tmp_path: Path) -> None:
    arguments = common(teacher, tmp_path / "same")
    arguments[arguments.index("derive:layers=2")] = str(teacher)
    distill(*arguments, "--steps", "1")
    found = read_report(tmp_path / "same").distillation
    assert found is not None
    assert found.curve[-1].kd == pytest.approx(0, abs=1e-5)
    assert found.arms["before"].metrics["agreement"].value == 1


def test_lora_student_is_merged(teacher: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    distill(*common(teacher, tmp_path / "lora"), "--lora", "4", "--lr", "1e-2")
    names = set(load_file(tmp_path / "lora" / "model.safetensors"))
    assert not any("lora" in name for name in names)
    found = read_report(tmp_path / "lora").distillation
    assert found is not None
    assert found.arms["after"].metrics["kl"].value < found.arms["before"].metrics["kl"].value


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_a_quantized_teacher_teaches_a_student_of_its_own_whole_weights(
    teacher: Path, tmp_path: Path, dtype: str
) -> None:
    pytest.importorskip("bitsandbytes")
    output = tmp_path / dtype
    distill(*common(teacher, output), "--teacher-dtype", dtype, "--lr", "1e-9")
    whole, student = load_file(teacher / "model.safetensors"), load_file(output / "model.safetensors")
    name = "model.layers.{}.self_attn.q_proj.weight"
    torch.testing.assert_close(student[name.format(1)], whole[name.format(3)])
    found = read_report(output).distillation
    assert found is not None
    assert found.arms["teacher"].parameters == sum(tensor.numel() for tensor in whole.values())


@pytest.mark.parametrize("options", [("--optimizer", "adamw8bit"), ("--dtype", "bfloat16")])
def test_other_arithmetic_learns_too(teacher: Path, tmp_path: Path, options: tuple[str, str]) -> None:
    if "adamw8bit" in options:
        pytest.importorskip("bitsandbytes")
    output = tmp_path / "student"
    distill(*common(teacher, output), *options, "--lr", "3e-3", "--steps", "20")
    found = read_report(output).distillation
    assert found is not None
    assert found.arms["after"].metrics["kl"].value < found.arms["before"].metrics["kl"].value
    assert {value.dtype for value in load_file(output / "model.safetensors").values()} == {torch.float32}


def test_hidden_and_relation_losses_pull_the_student(teacher: Path, tmp_path: Path) -> None:
    distill(
        *common(teacher, tmp_path / "inner"),
        "--hidden",
        "1",
        "--relations",
        "1",
        "--lr",
        "3e-3",
        "--steps",
        "40",
    )
    found = read_report(tmp_path / "inner").distillation
    assert found is not None
    points = [p for p in found.curve if p.loss is not None and p.kd is not None]
    assert all(p.loss > p.kd for p in points)  # type: ignore[operator]
    inner = [p.loss - p.kd for p in points]  # type: ignore[operator]
    assert inner[-1] < inner[0]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good or bad by one word; without a header line, as SST-2 comes."""
    file = tmp_path_factory.mktemp("reviews") / "train.tsv"
    rows = [
        ("the movie was " + ("good" if i % 2 else "bad") + " and long" * (i % 3), i % 2) for i in range(60)
    ]
    with file.open("w", newline="") as stream:
        csv.writer(stream, delimiter="\t").writerows(rows)
    return file


def test_a_classifier_is_taught_first_and_then_teaches(
    reviews: Path, make_llama: MakeLlama, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_llama())
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    base = tmp_path / "base"
    BertForSequenceClassification(config).bert.save_pretrained(base)
    tokenizer.save_pretrained(base)
    output = tmp_path / "student"
    distill(
        str(base), "-o", str(output), "--student", "derive:layers=1", "--task", "classification", "--data", str(reviews),
        "--header", "text,label", "--teacher-epochs", "6", "--epochs", "6", "--batch-size", "6", "--lr", "3e-3", "--device",
        "cpu", "--track", "none", "--cache", str(tmp_path / "cache"), "--min-accuracy-retention", "90%",
        "--metric", "macro_f1",
    )  # fmt: skip
    found = read_report(output).distillation
    assert found is not None
    assert found.arms["teacher"].metrics["accuracy"].value == 1
    assert found.arms["teacher"].metrics["macro_f1"].value == 1
    assert found.retention.value >= 0.9
    gate = read_report(output).gate
    assert gate is not None
    assert gate.results[0].outcome == "pass"
    student = BertForSequenceClassification.from_pretrained(output)
    assert student.config.id2label == {0: "0", 1: "1"}
    assert (tmp_path / "student-teacher" / "config.json").exists()


def test_a_failed_gate_keeps_the_student(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match=r"min_accuracy_retention: .* at least 150\.0 % is asked for"):
        distill(*common(teacher, tmp_path / "s"), "--min-accuracy-retention", "1.5")
    report = read_report(tmp_path / "s")
    assert report.distillation is not None
    assert report.gate is not None
    assert not report.gate.passed
    assert "**GATE FAILED**" in (tmp_path / "s" / "report.md").read_text()


def test_unfinished_work_is_not_thrown_away(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compressor.distillation import loop

    original = loop._checkpoint
    calls = 0

    def interrupted(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        original(*arguments)  # type: ignore[arg-type]
        if calls == 2:
            raise ConnectionError("the machine went away")

    output = tmp_path / "student"
    distill(*common(teacher, tmp_path / "straight"))
    monkeypatch.setattr(loop, "_checkpoint", interrupted)
    with pytest.raises(ConnectionError):
        distill(*common(teacher, output))
    assert not output.exists()
    monkeypatch.setattr(loop, "_checkpoint", original)
    with pytest.raises(UsageError, match="an unfinished run has another temperature"):
        distill(*common(teacher, output), "--temperature", "2")
    distill(*common(teacher, output))
    assert (output / "model.safetensors").read_bytes() == (
        tmp_path / "straight" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--student", "derive:layers=9"], "the teacher has 4 layers"),
        (["--task", "poetry"], "--task poetry: choose causal-lm"),
        (["--data", "missing.jsonl"], "no such file"),
        (["--divergence", "xkl"], "divergence"),
        (["--batch-size", "64"], "more than the"),
        (["--alpha", "0", "--control"], "already"),
        (["--beat-control"], "--beat-control needs --control"),
        (["--column", "text"], "give ROLE=NAME"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    teacher: Path, tmp_path: Path, extra: Sequence[str], message: str
) -> None:
    with pytest.raises((UsageError, InputRefused), match=message):
        distill(*common(teacher, tmp_path / "s"), *extra)
    assert not [p for p in tmp_path.iterdir() if p.name != "lock"]


def test_an_existing_output_is_refused_and_dry_run_writes_nothing(teacher: Path, tmp_path: Path) -> None:
    distill(*common(teacher, tmp_path / "s"), "--dry-run")
    assert not list(tmp_path.iterdir())
    (tmp_path / "s").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        distill(*common(teacher, tmp_path / "s"))


@pytest.mark.real_latency
def test_latency_of_the_reloaded_checkpoint(teacher: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "compressor.distillation.latency",
        str(teacher),
        "causal-lm",
        "2",
        "16",
        "cpu",
        "float32",
        "0.2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    timing = Latency(**json.loads(done.stdout.strip().splitlines()[-1]))
    assert 0 < timing.p50_ms <= timing.p95_ms
    assert timing.items_per_second == pytest.approx(2e3 / timing.p50_ms, rel=0.9)
