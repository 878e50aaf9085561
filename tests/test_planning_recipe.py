"""A recipe that scans, plans, quantizes and verifies, on a tiny random model."""

import re
from pathlib import Path

import pytest

from compressor.checkpoint.sidecar import read_sidecar
from compressor.errors import UsageError
from compressor.pipelines.run import run_recipe
from compressor.plans import read_plan
from compressor.recipes import VerifyRecipe, build_recipe
from compressor.reports.write import read_report


def overrides(model: Path, text: Path, output: Path, **more: object) -> dict[str, object]:
    return {
        "model": str(model),
        "output": output,
        "device": "cpu",
        "scan.formats": ["w4g32", "w8a8", "bf16"],
        "scan.data.data": str(text),
        "scan.data.samples": 4,
        "scan.data.sequence_length": 32,
        "plan.budget": "6bits",
        "quantize.method": "rtn",
        "quantize.engine": "vllm-cpu",
        "verify.engine": None,
        "evaluate.data": str(text),
        "evaluate.samples": 4,
        "evaluate.sequence_length": 32,
        **more,
    }


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(
        "\n".join(f"the quick fox number {i} jumps over dog {i * 7 % 13}" for i in range(200)), "utf-8"
    )
    return file


def test_mixed_checkpoint_is_what_was_planned(tiny_llama_dir: Path, text: Path, tmp_path: Path) -> None:
    recipe = build_recipe(None, overrides(tiny_llama_dir, text, tmp_path / "run"))
    report = run_recipe(recipe, command="run")
    assert report is not None
    plan = read_plan(tmp_path / "run" / "plan.yaml")
    assert len({a.format for a in plan.layers.values()}) >= 3
    assert report.verification is not None
    assert report.verification.passed
    made = Path(report.artifact.path) if report.artifact else Path()
    sidecar = read_sidecar(made)
    assert sidecar is not None
    assert sidecar.plan == plan
    assert (tmp_path / "run" / "sensitivity.svg").exists()
    # What the report draws of the scan and the plan.
    assert report.planning is not None
    assert report.scan is not None
    assert report.planning.chosen.bits <= 6
    assert report.planning.frontier[0].bits < report.planning.frontier[-1].bits
    assert len(report.scan.units) == 8
    page = (tmp_path / "run" / "report.html").read_text()
    for drawing in ("sensitivity-", "pareto-", "bits-"):
        assert f'id="{drawing}' in page


def test_only_what_a_change_touches_is_done_again(
    tiny_llama_dir: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def done_again(**more: object) -> list[str]:
        """The steps that a run with these changes does, by the record's own words about the others."""
        capsys.readouterr()
        recipe = build_recipe(None, overrides(tiny_llama_dir, text, tmp_path / "run", **more))
        run_recipe(recipe.model_copy(update={"verify": VerifyRecipe(engine=None)}), command="run")
        said = capsys.readouterr().err
        return [
            s for s in ("scan", "plan", "quantize", "evaluate", "report") if f"{s}: done before" not in said
        ]

    budget = {"plan.budget": "5.5bits"}
    assert done_again() == ["scan", "plan", "quantize", "evaluate", "report"]
    assert done_again() == []
    assert done_again(**{"gate.max_bytes": 10**9}) == ["report"]
    assert done_again(**{"evaluate.samples": 5}) == ["evaluate", "report"]
    assert done_again(**budget) == ["plan", "quantize", "evaluate", "report"]
    file = tmp_path / "run" / "plan.yaml"
    edited = re.sub(r"(layers\.0\.self_attn\.o_proj: \{format: )\w+, bytes: \d+", r"\1bf16", file.read_text())
    assert edited != file.read_text()
    file.write_text(edited)
    assert done_again(**budget) == ["quantize", "evaluate", "report"]
    assert file.read_text() == edited, "an edited plan is carried out, not made anew"
    report = read_report(tmp_path / "run")
    assert report.planning is None, "what was predicted of another plan is not told of this one"
    text.write_text(text.read_text() + "one more line\n")
    assert done_again(**budget)[0] == "scan"


def test_contradictions_are_refused(tiny_llama_dir: Path, text: Path, tmp_path: Path) -> None:
    both = overrides(tiny_llama_dir, text, tmp_path / "run", **{"quantize.plan": tmp_path / "p.yaml"})
    with pytest.raises(UsageError, match=r"quantize\.plan"):
        run_recipe(build_recipe(None, both), command="run", dry_run=True)
    alone = {k: v for k, v in overrides(tiny_llama_dir, text, tmp_path / "run").items() if k != "plan.budget"}
    with pytest.raises(UsageError, match="scan: serves nothing"):
        run_recipe(build_recipe(None, alone), command="run", dry_run=True)
