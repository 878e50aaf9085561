"""``scripts/ci_release.yml``: its steps, run here in order as GitHub runs them, on the built-in model."""

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
RECIPE = """\
model: builtin
quantize: {{scheme: w4g64, method: rtn}}
verify: {{engine: null}}
evaluate: {{samples: 8, sequence_length: 64}}
gate: {{max_kl: {max_kl}}}
"""


@pytest.fixture
def workflow() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "scripts" / "ci_release.yml").read_text("utf-8"))


def run_steps(workflow: dict[str, Any], directory: Path, max_kl: float) -> dict[str, int]:
    """Exit codes of the steps by name; the first that fails ends the job. Packages are those of this interpreter."""
    (directory / "bin").mkdir(exist_ok=True)
    command = directory / "bin" / "compressor"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m compressor "$@"\n')
    command.chmod(0o755)
    (directory / "recipe.yaml").write_text(RECIPE.format(max_kl=max_kl))
    environment = {
        **os.environ,
        **workflow["env"],
        "RECIPE": "recipe.yaml",
        "GITHUB_STEP_SUMMARY": str(directory / "summary.md"),
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    codes = {}
    for step in workflow["jobs"]["compress"]["steps"]:
        if "run" in step and step["name"] != "Install":
            shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
            done = subprocess.run(shell, cwd=directory, env=environment, capture_output=True, text=True)
            (directory / f"{step['name']}.log").write_text(done.stdout + done.stderr)
            codes[step["name"]] = done.returncode
            if done.returncode:
                break
    return codes


def test_the_workflow_makes_gates_and_packs_a_release(workflow: dict[str, Any], tmp_path: Path) -> None:
    codes = run_steps(workflow, tmp_path, max_kl=10)
    assert codes == dict.fromkeys(
        ["Compress, verify, evaluate", "Gate", "Verify what is published", "Pack"], 0
    )
    assert "gate passed" in (tmp_path / "summary.md").read_text("utf-8")
    with tarfile.open(tmp_path / "model.tar") as archive:
        members = archive.getmembers()
    assert {"checkpoint/SHA256SUMS", "checkpoint/model.safetensors"} <= {m.name for m in members}
    assert {(m.uid, m.mtime) for m in members} == {(0, 0)}
    uploads = {
        step["with"]["name"]: step["with"]["path"].replace("${{ env.RUN }}", workflow["env"]["RUN"]).split()
        for step in workflow["jobs"]["compress"]["steps"]
        if "upload-artifact" in step.get("uses", "")
    }
    for pattern in [*uploads["report"], *uploads["model"]]:
        assert list(tmp_path.glob(pattern)), pattern

    # A stricter gate: the report is there already, and the job ends with the reason.
    codes = run_steps(workflow, tmp_path, max_kl=0.0001)
    assert codes == {"Compress, verify, evaluate": 0, "Gate": 3}
    assert "::error file=" in (tmp_path / "Gate.log").read_text("utf-8")
    assert "❌ fail" in (tmp_path / "summary.md").read_text("utf-8")


def test_its_recipe_has_the_gate_that_it_asks_for(workflow: dict[str, Any]) -> None:
    assert yaml.safe_load((ROOT / workflow["env"]["RECIPE"]).read_text("utf-8"))["gate"]
