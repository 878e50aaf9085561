"""Kill a whole pipeline run with SIGKILL at random moments, resume it, and compare the bytes with an unbroken run's.

    python scripts/kill_at_random.py [--kills 20] [--seed 0] [--distill] [--directory DIR]

The run (distills,) scans, plans, quantizes, verifies, evaluates and reports the built-in model. Compared are the checkpoint with
all its files, the student's weights, scan, plan and lock. Prints a line for each kill; exits with 1 when any byte differs.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

RECIPE = """\
model: builtin
device: cpu
scan: {formats: [w4g32, w8, bf16], draws: 1, data: {data: TEXT, samples: 4, sequence_length: 64}}
plan: {budget: 6bits}
quantize: {calibration: {data: TEXT, samples: 16, sequence_length: 128}}
verify: {engine: null}
evaluate: {data: TEXT, samples: 8, sequence_length: 64}
gate: {max_kl: 10}
"""

DISTILL = """\
distill:
  {student: "derive:layers=4", steps: 4, batch_size: 4, save_every: 1, track: none,
   data: {train: TEXT, length: 64, samples: 64, evaluate_samples: 4, test_samples: 4}}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--distill", action="store_true", help="begin with a distillation, which takes most of the time"
    )
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import compressor.pipelines.run  # noqa: F401  # what the forked runs need is imported once

    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        work = Path(name)
        text = shutil.copy(Path(__file__).parent.parent / "benchmarks.md", work / "text.txt")
        (work / "recipe.yaml").write_text(
            ((DISTILL if arguments.distill else "") + RECIPE).replace("TEXT", str(text))
        )
        start = time.monotonic()
        run(work)
        whole, seconds = digests(work / "run"), time.monotonic() - start
        print(f"unbroken: {seconds:.1f} s, {len(whole)} files", flush=True)
        wrong = killed = 0
        while killed < arguments.kills:
            shutil.rmtree(work / "run")
            moment = draw.uniform(0, seconds)
            start = time.monotonic()
            if not run(work, kill_after=moment):
                seconds = time.monotonic() - start  # the machine has become faster
                continue
            killed += 1
            at = step(work / "run")
            run(work)
            found = digests(work / "run")
            different = sorted(key for key in whole.keys() | found.keys() if whole.get(key) != found.get(key))
            wrong += bool(different)
            print(
                f"{killed:2d}: killed after {moment:5.1f} s in {at}: {different or 'same bytes'}", flush=True
            )
    print(f"{killed - wrong} of {killed} ended in the same bytes")
    sys.exit(1 if wrong else 0)


def run(work: Path, kill_after: float | None = None) -> bool:
    """``compressor run`` in a forked process; whether it was killed before its end."""
    child = os.fork()
    if child == 0:
        quiet = os.open(work / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.argv = ["compressor", "run", str(work / "recipe.yaml"), "-o", str(work / "run")]
        from compressor.cli.main import main as command

        try:
            command()
        except SystemExit as stop:
            os._exit(int(stop.code or 0))
    moment = time.monotonic() + (kill_after or 0)
    ended, status = os.waitpid(child, os.WNOHANG if kill_after is not None else 0)
    while not ended:
        time.sleep(0.01)
        if time.monotonic() > moment:
            os.kill(child, signal.SIGKILL)
        ended, status = os.waitpid(child, os.WNOHANG)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status) != 0:
        sys.exit(f"the run ended with {os.WEXITSTATUS(status)}:\n{(work / 'log').read_text()[-2000:]}")
    return False


def step(directory: Path) -> str:
    """The step that the run had begun, or that comes next."""
    try:
        steps = json.loads((directory / "run.json").read_text("utf-8"))["steps"]
    except OSError:
        return "preparation"
    return next(
        (name for name, record in steps.items() if "facts" not in record), f"what follows {[*steps][-1]}"
    )


def digests(directory: Path) -> dict[str, str]:
    files = [f for f in (directory / "checkpoint").rglob("*") if f.is_file()]
    files += (directory / "student").glob("*.safetensors")
    files += [directory / name for name in ("sensitivity.json", "plan.yaml", "recipe.lock.yaml")]
    return {str(f.relative_to(directory)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


if __name__ == "__main__":
    main()
