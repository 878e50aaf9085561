"""A recipe that scans, plans, quantizes and verifies, on a tiny random model."""

from pathlib import Path

import pytest

from compressor.errors import UsageError
from compressor.pipelines.mixed import with_plan
from compressor.pipelines.quantize import quantize
from compressor.pipelines.run import run_recipe
from compressor.plans import read_plan
from compressor.recipes import build_recipe


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
    planned = with_plan(recipe, tmp_path / "run", overwrite=False)
    plan = read_plan(tmp_path / "run" / "plan.yaml")
    assert len({a.format for a in plan.layers.values()}) >= 3
    done = quantize(planned, tmp_path / "run" / "checkpoint")
    assert all(check.passed for check in done.checks)
    assert done.job.plan == plan
    assert (tmp_path / "run" / "sensitivity.svg").exists()
    before = (tmp_path / "run" / "sensitivity.json").stat().st_mtime_ns
    with_plan(recipe, tmp_path / "run", overwrite=False)
    assert (tmp_path / "run" / "sensitivity.json").stat().st_mtime_ns == before, (
        "a finished scan is used again"
    )
    other = build_recipe(None, overrides(tiny_llama_dir, text, tmp_path / "run", **{"scan.draws": 2}))
    with pytest.raises(UsageError, match="another recipe"):
        with_plan(other, tmp_path / "run", overwrite=False)


def test_contradictions_are_refused(tiny_llama_dir: Path, text: Path, tmp_path: Path) -> None:
    both = overrides(tiny_llama_dir, text, tmp_path / "run", **{"quantize.plan": tmp_path / "p.yaml"})
    with pytest.raises(UsageError, match=r"quantize\.plan"):
        run_recipe(build_recipe(None, both), command="run", dry_run=True)
    alone = {k: v for k, v in overrides(tiny_llama_dir, text, tmp_path / "run").items() if k != "plan.budget"}
    with pytest.raises(UsageError, match="scan: serves nothing"):
        run_recipe(build_recipe(None, alone), command="run", dry_run=True)
