"""The proof by vLLM: it loads the checkpoint, and where the processor has the kernels, answers like transformers."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compressor.checkpoint import engine_vllm
from compressor.checkpoint.artifact import Artifact
from compressor.checkpoint.file_checks import Failed, Skipped
from compressor.checkpoint.reload import load_in_transformers, run_process, token_sequences
from compressor.errors import MachineLimit, UsageError

_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 8, 16, 16
_AGREEMENT = 0.9


def engine_interpreter(engine_python: Path | None) -> Path:
    """The Python that has vLLM: the one given, or this one. It is only asked, so this takes a moment.

    Raises UsageError or MachineLimit when it is not there or has no vLLM.
    """
    python = engine_python if engine_python is not None else Path(sys.executable)
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([str(python), "-c", ask], env=_environment(), check=False, capture_output=True)
    except OSError as error:
        raise UsageError(f"--engine-python {python}: cannot be run ({error.strerror})") from None
    if found.returncode != 0:
        raise MachineLimit(
            f"{python}: has no vllm: make an environment with scripts/engine_env.sh and pass --engine-python"
        )
    return python


def check_vllm(artifact: Artifact, python: Path, trust_remote_code: bool) -> str:
    """vLLM loads the checkpoint and continues eight prompts greedily with the tokens that transformers chooses.

    transformers reads each continuation and says what it would have chosen at every position; 90 % must
    agree (the engines sum in different orders, and a near tie falls either way). A processor without the
    kernels stops after loading, which is reported and no failure.
    """
    architecture = str((artifact.config.get("architectures") or [""])[0])
    if not architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise Skipped(f"{architecture} does not generate text")
    prompts = token_sequences(artifact, trust_remote_code, count=_PROMPTS, length=_PROMPT_TOKENS)
    report = _run(artifact, python, prompts)
    engine = report.get("engine", "vllm")
    if report["stage"] != "done":
        if report["stage"] == "run" and report["no_kernel"]:
            return f"{engine}: loaded; not run: this processor has no kernel for it ({report['error']})"
        verb = "load" if report["stage"] == "load" else "run"
        raise Failed(f"{engine} cannot {verb} it: {report['error']}")

    sequences = [prompt + new for prompt, new in zip(prompts, report["tokens"], strict=True)]
    theirs = load_in_transformers(
        artifact.path, sequences, trust_remote_code, dtype=report["dtype"], upcast=False
    )
    agreed = total = 0
    identical = 0
    for prompt, new, logits in zip(prompts, report["tokens"], theirs.outputs, strict=True):
        chosen = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        same = sum(a == b for a, b in zip(chosen, new, strict=True))
        agreed, total, identical = agreed + same, total + len(new), identical + (same == len(new))
    line = (
        f"{engine}, {report['dtype']}: {agreed} of {total} greedy tokens as in transformers, "
        f"{identical} of {len(prompts)} continuations identical"
    )
    if agreed < _AGREEMENT * total:
        raise Failed(f"{line}; {_AGREEMENT:.0%} must agree")
    return line


def _run(artifact: Artifact, python: Path, prompts: list[list[int]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="compressor-") as name:
        directory = Path(name)
        # Copied, because Python puts a script's directory first on its path, and ours has a compressed_tensors.py.
        shutil.copyfile(str(engine_vllm.__file__), directory / "engine_vllm.py")
        request = {"model": str(artifact.path.resolve()), "prompts": prompts, "max_tokens": _NEW_TOKENS}
        (directory / "request.json").write_text(json.dumps(request), "utf-8")
        command = [str(python.absolute()), "engine_vllm.py", "request.json", "report.json"]
        errors = run_process(command, directory, _environment())
        try:
            report: dict[str, Any] = json.loads((directory / "report.json").read_text("utf-8"))
        except OSError:
            raise Failed(f"vllm: the process ended without a report: {errors}") from None
        return report


def _environment() -> dict[str, str]:
    """This environment, without what would lead another interpreter to this one's packages."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
