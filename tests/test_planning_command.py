"""``scan-sensitivity`` and ``plan`` as a user runs them, on a tiny random model."""

import itertools
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from compressor.cli.plan import plan
from compressor.cli.scan import scan_sensitivity
from compressor.errors import InputRefused, UsageError
from compressor.plans import read_plan

app = typer.Typer()
app.command()(scan_sensitivity)
app.command()(plan)


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(
        app, [str(a) for a in arguments], catch_exceptions=False, standalone_mode=False
    )
    assert result.exception is None
    return result.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = ["fox", "dog", "jug", "zebra", "object", "class", "jumps", "refers", "quick", "lazy"]
    lines = [" ".join(words[(i * j + i) % 10] for j in range(1, 9)) + "." for i in range(400)]
    file.write_text("\n".join(lines), "utf-8")
    return file


@pytest.fixture(scope="module")
def scan_file(tiny_llama_dir: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("scan") / "sensitivity.json"
    arguments = ("--formats", "w3g32,w4g32,w8", "--data", text, "--samples", "8", "--sequence-length", "32")
    shown = run(
        "scan-sensitivity", tiny_llama_dir, "-o", file, "--heat-map", file.with_suffix(".svg"), *arguments
    )
    assert "most fragile" in shown
    assert file.with_suffix(".svg").read_text("utf-8").lstrip().startswith("<?xml")
    assert [f.name for f in file.parent.iterdir() if f.name.startswith(".")] == []
    return file


def test_plan_is_the_same_byte_for_byte_and_one_format_a_unit(scan_file: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for file in files:
        run("plan", scan_file, "--budget", "5.5bits", "-o", file, "--pareto", file.with_suffix(".json"))
    texts = [file.read_text("utf-8").replace(file.name, "") for file in files]
    assert texts[0] == texts[1]
    chosen = read_plan(files[0])
    for block in (0, 1):
        formats = {chosen.layers[f"model.layers.{block}.self_attn.{p}_proj"].format for p in "qkv"}
        assert len(formats) == 1
    curve = json.loads((tmp_path / "a.json").read_text("utf-8"))["plans"]
    assert len(curve) > 5
    assert all(low["bytes"] < high["bytes"] for low, high in itertools.pairwise(curve))


def test_measured_plans_calibrate_the_prediction(scan_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    plot = tmp_path / "plot.svg"
    answer = json.loads(
        run(
            "plan", scan_file, "--budget", "6bits", "-o", file, "--measure", "3", "--samples", "8", "--sequence-length",
            "32", "--plot", plot, "--json", "--device", "cpu",
        )
    )  # fmt: skip
    points = answer["calibration"]["points"]
    assert len(points) == 3
    assert all(point["measured"] > 0 for point in points)
    assert answer["predicted_kl"] == pytest.approx(read_plan(file).predicted_kl, rel=1e-3)
    smallest, largest = min(p["measured"] for p in points), max(p["measured"] for p in points)
    assert smallest / 3 < answer["predicted_kl"] < largest * 3
    assert plot.exists()


def test_dry_runs_write_nothing(tiny_llama_dir: Path, scan_file: Path, text: Path, tmp_path: Path) -> None:
    shown = run(
        "scan-sensitivity", tiny_llama_dir, "-o", tmp_path / "s.json", "--data", text, "--samples", "2",
        "--sequence-length", "16", "--dry-run",
    )  # fmt: skip
    assert "unit × format pairs" in shown
    assert "bits a weight" in run(
        "plan", scan_file, "--budget", "6bits", "-o", tmp_path / "p.yaml", "--dry-run"
    )
    assert list(tmp_path.iterdir()) == []


def test_refusals(scan_file: Path, tiny_llama_dir: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken.yaml"
    taken.write_text("mine", "utf-8")
    for arguments, error, message in (
        (("plan", scan_file, "--budget", "6bits", "-o", taken), UsageError, "already exists"),
        (("plan", scan_file, "--budget", "2bits", "-o", tmp_path / "p"), UsageError, "nearest feasible"),
        (
            ("plan", tmp_path / "none.json", "--budget", "6bits", "-o", tmp_path / "p"),
            UsageError,
            "cannot be read",
        ),
        (
            ("plan", scan_file, "--budget", "6bits", "--engine", "vllm", "-o", tmp_path / "p"),
            UsageError,
            "vllm-cuda",
        ),
        (("scan-sensitivity", tiny_llama_dir, "--score", "best", "-o", tmp_path / "s"), UsageError, "fisher"),
        (("scan-sensitivity", tmp_path, "-o", tmp_path / "s"), InputRefused, "not a transformers checkpoint"),
    ):
        with pytest.raises(error, match=message):
            run(*arguments)
    assert taken.read_text("utf-8") == "mine"


def test_changed_weights_are_noticed(
    scan_file: Path,
    make_llama,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    data = json.loads(scan_file.read_text("utf-8"))
    data["model"] = str(make_llama(seed=9))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data), "utf-8")
    with pytest.raises(InputRefused, match="scan again"):
        run(
            "plan", other, "--budget", "6bits", "-o", tmp_path / "p.yaml", "--measure", "2", "--device", "cpu"
        )
    assert not (tmp_path / "p.yaml").exists()
