"""Quantize one model with compressor and with its peers, on the same tokens, and compare time and quality.

    python scripts/bench_peers.py --model DIR --calibration valid.txt --evaluation test.txt \\
        --llmcompressor /path/to/venv/bin/python --autoround /path/to/venv/bin/python [--bits 4] [--group-size 32]

Each tool runs in a process of its own, one after the other, and its wall time is the whole process: start,
load, calibrate, save (and for compressor also verify, shown separately). Every result is then evaluated by
``compressor evaluate`` against the original on the same tokens. Peers need an interpreter with the package.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from compressor.sources.model import load_tokenizer, open_model
from compressor.sources.text import read_rows, tokenize

PEERS = Path(__file__).parent / "peers"


def main() -> None:
    arguments = _arguments()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    tokens = work / "calibration.json"
    _write_tokens(arguments, tokens)

    results: list[dict[str, Any]] = []
    for name, command, output in _runs(arguments, tokens):
        shutil.rmtree(output, ignore_errors=True)
        print(f"== {name}", flush=True)
        start = time.monotonic()
        subprocess.run(command, check=True, env=_environment())
        seconds = time.monotonic() - start
        results.append({"name": name, "seconds": seconds} | _evaluate(arguments, output))
        print(json.dumps(results[-1]), flush=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(f"\nlargest child process: {peak:.2f} GB\n")
    print("| | seconds | KL to the original (nats/token) | top-1 agreement | perplexity | MB |")
    print("|---|---|---|---|---|---|")
    for r in results:
        kl = f"{r['kl']['value']:.4f} [{r['kl']['low']:.4f}, {r['kl']['high']:.4f}]"
        print(
            f"| {r['name']} | {r['seconds']:.0f} | {kl} | {r['agreement']:.3f} | {r['perplexity']:.2f} | {r['bytes'] / 1e6:.0f} |"
        )
    (work / "results.json").write_text(json.dumps(results, indent=2) + "\n")


def _runs(arguments: argparse.Namespace, tokens: Path) -> list[tuple[str, list[str], Path]]:
    work, model = arguments.work, str(arguments.model)
    scheme = f"w{arguments.bits}g{arguments.group_size}"
    ours = [sys.executable, "-m", "compressor", "quantize", model, "--scheme", scheme]
    data = ["--data", str(arguments.calibration), "--samples", str(arguments.samples)]
    data += ["--sequence-length", str(arguments.sequence_length)]
    runs = []
    for method in arguments.methods:
        output = work / f"compressor-{method}"
        runs.append((f"compressor {method}", [*ours, "--method", method, *data, "-o", str(output)], output))
    if arguments.llmcompressor:
        output = work / "llmcompressor"
        script = [
            arguments.llmcompressor,
            str(PEERS / "llmcompressor_gptq.py"),
            model,
            str(tokens),
            str(output),
        ]
        runs.append(
            ("llm-compressor gptq", [*script, str(arguments.bits), str(arguments.group_size)], output)
        )
    if arguments.autoround:
        output = work / "autoround"
        script = [arguments.autoround, str(PEERS / "autoround.py"), model, str(tokens), str(output)]
        script += [str(arguments.bits), str(arguments.group_size), str(arguments.autoround_iterations)]
        runs.append((f"AutoRound, {arguments.autoround_iterations} iterations", script, output))
    return runs


def _write_tokens(arguments: argparse.Namespace, file: Path) -> None:
    """The token windows that compressor calibrates on, for the peers."""
    source = open_model(str(arguments.model))
    chosen = tokenize(
        read_rows(str(arguments.calibration)),
        load_tokenizer(source),
        samples=arguments.samples,
        sequence_length=arguments.sequence_length,
        pick="spread",
        seed=0,
    )
    file.write_text(json.dumps(chosen.input_ids.tolist()))


def _evaluate(arguments: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "compressor",
        "evaluate",
        str(checkpoint),
        "--baseline",
        str(arguments.model),
    ]
    command += ["--data", str(arguments.evaluation), "--samples", "32", "--sequence-length", "512", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=_environment())
    report = json.loads(done.stdout)
    metrics = report["evaluation"]["metrics"]
    return {
        "kl": metrics["kl"]["compressed"],
        "agreement": metrics["top1_agreement"]["compressed"]["value"],
        "perplexity": metrics["perplexity"]["compressed"]["value"],
        "bytes": report["artifact"]["bytes"],
    }


def _environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="safetensors directory of the original")
    parser.add_argument("--calibration", type=Path, required=True, help="text file")
    parser.add_argument("--evaluation", type=Path, required=True, help="text file")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--methods", nargs="*", default=["rtn", "gptq"], help="compressor methods to run")
    parser.add_argument("--llmcompressor", help="interpreter with llmcompressor installed")
    parser.add_argument("--autoround", help="interpreter with auto-round installed")
    parser.add_argument("--autoround-iterations", type=int, default=50)
    parser.add_argument("--work", type=Path, default=Path("runs/bench_peers"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
