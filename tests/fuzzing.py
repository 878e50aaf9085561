"""One random model through ``compressor quantize``."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from architectures import random_changes, save_family
from cli import run_here


@dataclass(frozen=True)
class Outcome:
    """``refused`` is one line before calibration; ``unbuildable`` settings are those that transformers refuses."""

    ending: Literal["verified", "refused", "unbuildable", "wrong"]
    detail: str


def fuzz_once(name: str, seed: int, directory: Path) -> Outcome:
    """Quantize a random model of the family ``name`` with a random scheme and method."""
    rng = random.Random(seed)
    changes = random_changes(name, seed)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    scheme = rng.choice(["w4g128", "w4g32", "w4g32", "w4", "w8", "w8a8", "w3g32"])
    method = rng.choice(["rtn", "gptq"])
    what = f"{scheme} {method} {dtype} {changes}"
    try:
        save_family(directory / "model", name, seed, dtype, **changes)
    except Exception as error:  # whatever transformers says to settings that do not go together
        return Outcome("unbuildable", f"{type(error).__name__}: {error} ({what})")
    data = [] if method == "rtn" else ["--samples", 4, "--sequence-length", 24]
    target = directory / "quantized"
    try:
        code, out, err = run_here(
            "quantize",
            directory / "model",
            "-o",
            target,
            "--scheme",
            scheme,
            "--method",
            method,
            "--json",
            *data,
        )
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {error} ({what})")
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    if code == 0 and all(check["passed"] for check in json.loads(out)["checks"]) and target.is_dir():
        return Outcome("verified", what)
    begun = any(line.startswith(("checking source weights", "quantizing")) for line in err.splitlines())
    if code in (2, 5) and len(lines) == 1 and "Traceback" not in err and not begun and not target.exists():
        return Outcome("refused", f"{lines[0]} ({what})")
    return Outcome("wrong", f"exit {code}: {' '.join(lines) or err[-300:]} ({what})")
