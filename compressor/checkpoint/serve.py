"""The proof by vLLM: it loads the checkpoint, and where the processor has the kernels, answers like transformers."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from compressor.checkpoint import engine_vllm
from compressor.checkpoint.artifact import Artifact
from compressor.checkpoint.file_checks import Failed, Skipped
from compressor.checkpoint.reload import load_in_transformers, run_process, token_sequences
from compressor.errors import MachineLimit, UsageError
from compressor.graph.inputs import config_reads_speech

_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 8, 16, 16
_AGREEMENT = 0.9
_NEAR = math.log(2)  # nats
_INEXACT = 0.01


def engine_interpreter(engine_python: Path | None) -> Path:
    """The Python that has vLLM: the one given, or this one. It is only asked, so this takes a moment.

    Raises UsageError or MachineLimit when it is not there or has no vLLM.
    """
    python = engine_python if engine_python is not None else Path(sys.executable)
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run(
            [str(python), "-c", ask], env=engine_environment(), check=False, capture_output=True
        )
    except OSError as error:
        raise UsageError(f"--engine-python {python}: cannot be run ({error.strerror})") from None
    if found.returncode != 0:
        raise MachineLimit(
            f"{python}: has no vllm: make an environment with scripts/engine_env.sh and pass --engine-python"
        )
    return python


def check_vllm(artifact: Artifact, python: Path, trust_remote_code: bool) -> str:
    """vLLM loads the checkpoint and continues eight prompts greedily as transformers would.

    transformers reads each continuation and says what it would have chosen at every position. For 90 % of
    them vLLM must have chosen the same token or one at least half as likely: engines sum in different orders
    and quantize inputs by slightly different rules (vLLM by absmax / 127, transformers by absmax / 127.5),
    so that choices between near equals fall either way.

    Two kinds of processor are no fault of the checkpoint, and only reported: one that lacks the kernels, so
    that vLLM stops after loading, and one whose INT8 products saturate.
    """
    architecture = str((artifact.config.get("architectures") or [""])[0])
    if not architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise Skipped(f"{architecture} does not generate text")
    if config_reads_speech(artifact.config):
        raise Skipped(f"{architecture} reads speech, and the check is made of text")
    prompts = token_sequences(artifact, trust_remote_code, count=_PROMPTS, length=_PROMPT_TOKENS)
    return judge(artifact, prompts, _run(artifact, python, prompts), trust_remote_code)


def judge(
    artifact: Artifact, prompts: list[list[int]], report: dict[str, Any], trust_remote_code: bool
) -> str:
    """What ``engine_vllm`` reports of ``prompts``, by :func:`check_vllm`'s rule. Raises Failed."""
    engine = report.get("engine", "vllm")
    if report["stage"] != "done":
        if report["no_kernel"] and "KV cache" in report["error"]:
            return f"{engine}: not run: this processor cannot cache in FP8 ({report['error']})"
        if report["stage"] == "run" and report["no_kernel"]:
            return f"{engine}: loaded; not run: this processor has no kernel for it ({report['error']})"
        verb = "load" if report["stage"] == "load" else "run"
        raise Failed(f"{engine} cannot {verb} it: {report['error']}")

    sequences = [prompt + new for prompt, new in zip(prompts, report["tokens"], strict=True)]
    theirs = load_in_transformers(
        artifact.path, sequences, trust_remote_code, dtype=report["dtype"], upcast=False
    )
    # What transformers gives up, in nats, by taking vLLM's token for its own first choice.
    regrets = []
    for prompt, new, logits in zip(prompts, report["tokens"], theirs.outputs, strict=True):
        logits = logits[len(prompt) - 1 : -1]
        regrets.append(logits.amax(-1) - logits.gather(-1, torch.tensor(new)[:, None])[:, 0])
    regret = torch.cat(regrets)
    same, near, total = int((regret == 0).sum()), int((regret <= _NEAR).sum()), regret.numel()
    line = (
        f"{engine}, {report['dtype']}: {same} of {total} greedy tokens are transformers' first choice, "
        f"{near} at least half as likely"
    )
    inexact = report.get("int8_error") or 0.0
    if inexact > _INEXACT and any(
        f is not None and f.activations == "int8" for f in artifact.formats.values()
    ):
        return f"{line}; this processor's INT8 products saturate, {inexact:.0%} off at full scale (no VNNI)"
    if near < _AGREEMENT * total:
        raise Failed(f"{line}; {_AGREEMENT:.0%} are needed")
    return line


def _run(artifact: Artifact, python: Path, prompts: list[list[int]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="compressor-") as name:
        directory = Path(name)
        # Copied, because Python puts a script's directory first on its path, and ours has a compressed_tensors.py.
        shutil.copyfile(str(engine_vllm.__file__), directory / "engine_vllm.py")
        request = {"model": str(artifact.path.resolve()), "prompts": prompts, "max_tokens": _NEW_TOKENS}
        (directory / "request.json").write_text(json.dumps(request), "utf-8")
        command = [str(python.absolute()), "engine_vllm.py", "request.json", "report.json"]
        errors = run_process(command, directory, engine_environment())
        try:
            report: dict[str, Any] = json.loads((directory / "report.json").read_text("utf-8"))
        except OSError:
            raise Failed(f"vllm: the process ended without a report: {errors}") from None
        return report


def engine_environment() -> dict[str, str]:
    """This environment, without what would lead another interpreter to this one's packages."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
