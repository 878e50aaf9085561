"""Quantize random small models of every family: each run must end in a verified checkpoint or in one line.

    python scripts/fuzz_architectures.py --runs 200 [--seed 0] [--family mixtral]

A run that ends in anything else (a traceback, a failed verification, a refusal after calibration has begun) is
printed with what reproduces it, and the exit code is 1.
"""

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from architectures import FAMILIES
from fuzzing import fuzz_once


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has the next")
    parser.add_argument("--family", choices=FAMILIES, help="only this one; default: all in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)

    names = [options.family] if options.family else list(FAMILIES)
    endings: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    for seed in range(options.seed, options.seed + options.runs):
        name = names[seed % len(names)]
        with tempfile.TemporaryDirectory() as directory:
            outcome = fuzz_once(name, seed, Path(directory))
        endings[outcome.ending] += 1
        if outcome.ending == "wrong" or options.family:
            print(f"{name} seed {seed}: {outcome.ending}: {outcome.detail}", flush=True)
    print(f"{dict(endings)} in {time.monotonic() - start:.0f} s")
    return 1 if endings["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
