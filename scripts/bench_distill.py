"""Measure what distillation is claimed to do; writes Markdown.

    python scripts/bench_distill.py step    --model SMOLLM2
    python scripts/bench_distill.py sst2    --model MINILM  --data DIRECTORY
    python scripts/bench_distill.py depth   --model SMOLLM2 --train TEXT --test TEXT --minutes 20
    python scripts/bench_distill.py recover --model SMOLLM2 --train TEXT --test TEXT --minutes 10 --method rtn

``step``: memory and speed of one distillation step. ``sst2``: a fine-tuned teacher, a 3-layer student, INT8 on
top. ``depth``: 20 of 30 layers. ``recover``: a 3-bit checkpoint and its recovery. Each appends to --output.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def compressor(*arguments: object) -> None:
    command = [sys.executable, "-m", "compressor", *map(str, arguments)]
    print("$ compressor", *arguments, flush=True)
    done = subprocess.run(command)
    if done.returncode not in (0, 3):  # a gate that fails is a result
        sys.exit(f"exit {done.returncode}")


def table(directory: Path) -> str:
    """The student's part of its report.md, without the folded sections."""
    text = (directory / "report.md").read_text("utf-8")
    part = text[text.index("**Distillation**") :]
    return part[: part.index("<details><summary>Data and provenance")]


def step(args: argparse.Namespace) -> str:
    """Seconds of a distillation step against a plain teacher forward and a plain student step, interleaved."""
    from compressor.distillation.derive import Request, derive
    from compressor.distillation.forward import RowModel, row_loss
    from compressor.distillation.fused import Objective
    from compressor.distillation.models import load_model
    from compressor.distillation.tasks import Example, collate
    from compressor.distillation.teacher import LiveTeacher
    from compressor.sources.model import open_model

    torch.manual_seed(0)
    teacher = load_model(open_model(args.model), "causal-lm", device="cpu")
    ids = torch.randint(0, teacher.config.vocab_size, (4, 257))
    items = [Example({"input_ids": row[:-1].tolist()}, row[1:].tolist(), str(i)) for i, row in enumerate(ids)]
    batch = collate("causal-lm", items, pad_id=0)
    student, _ = derive(teacher, Request(layers=(args.layers,)), [batch], "causal-lm")
    student.requires_grad_(True)
    live = LiveTeacher(RowModel(teacher, teacher, "causal-lm", fused=True), temperature=1.0, vocabulary=None)
    rows = RowModel(student, student, "causal-lm", fused=True)

    def teacher_forward() -> None:
        with torch.no_grad():
            teacher(**batch.inputs)

    def student_step() -> None:
        student(**batch.inputs, labels=batch.inputs["input_ids"]).loss.backward()
        student.zero_grad()

    def distillation_step() -> None:
        sums = row_loss("causal-lm", rows(batch), batch.labels, live(batch), Objective())
        (sums.total / len(batch.labels)).backward()
        student.zero_grad()

    parts: dict[str, Callable[[], None]] = {
        "teacher forward": teacher_forward, "student forward and backward": student_step, "distillation step": distillation_step,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(args.repeats + 1):
        for name, part in parts.items():
            started = time.perf_counter()
            part()
            if turn:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - started)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = (median["teacher forward"] + median["student forward and backward"]) / median["distillation step"]
    lines = [f"| {name} | {value:.2f} s |" for name, value in median.items()]
    return "\n".join(
        [
            f"4 × 256 tokens, V={teacher.config.vocab_size:,}, teacher of {teacher.config.num_hidden_layers} layers, student of {args.layers}, "
            f"{torch.get_num_threads()} threads, fp32, median of {args.repeats}",
            "", "| | |", "|---|---:|", *lines, f"| throughput of the step ÷ that of the two parts | {ratio:.2f} |",
        ]
    )  # fmt: skip


def sst2(args: argparse.Namespace) -> str:
    student, int8 = args.work / "sst2", args.work / "sst2-int8"
    data = [
        "--data", args.data / "sst2.train.tsv", "--evaluate-data", args.data / "sst2.dev.tsv", "--test-data",
        args.data / "sst2.test.tsv", "--header", "text,label", "--length", 64,
    ]  # fmt: skip
    if not student.exists():
        compressor(
            "distill", args.model, "-o", student, "--student", "derive:layers=3", "--task", "classification", *data,
            "--teacher-epochs", args.teacher_epochs, "--augment", args.augment, "--epochs", args.epochs, "--lr", 2e-4, "--batch-size", 32,
            "--micro-batch", 8, "--alpha", 0.9, "--hidden", 1, "--control", "--dtype", args.dtype, "--device", "cpu", "--min-accuracy-retention", 0.97,
            "--evaluate-samples", 872, "--beat-control", "--on-inconclusive", "warn",
        )  # fmt: skip
    if not int8.exists():
        compressor("quantize", student, "-o", int8, "--scheme", "w8a8", "--method", "rtn", "--device", "cpu")
    before, after = (accuracy(path, args.data) for path in (student, int8))
    line = f"INT8 W8A8 of the student: accuracy {after:.4f}, {100 * (after - before):+.2f} points against {before:.4f}"
    teacher = student.with_name(f"{student.name}-teacher")
    return f"{table(student)}\n{line}\n\n{in_turns(teacher, student)}"


def in_turns(teacher: Path, student: Path, rounds: int = 7) -> str:
    """Throughput of both, timed one after the other several times, so that a busy machine slows both."""
    from compressor.distillation.latency import measure_latency

    ratios = []
    for _ in range(rounds):
        before, after = (
            measure_latency(
                path, "classification", batch=32, length=64, device="cpu", dtype="float32", seconds=3
            )
            for path in (teacher, student)
        )
        ratios.append(after.items_per_second / before.items_per_second)
    return (
        f"Throughput of the student ÷ the teacher's, forward passes of 32 × 64 tokens in turns: median {statistics.median(ratios):.2f} "
        f"of {rounds} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def accuracy(directory: Path, data: Path) -> float:
    from compressor.distillation.forward import RowModel
    from compressor.distillation.measure import score, value
    from compressor.distillation.models import load_model
    from compressor.distillation.tasks import DataSpec, read_examples
    from compressor.sources.model import load_tokenizer, open_model

    source = open_model(str(directory), allow_quantized=True)
    model = load_model(source, "classification", device="cpu")
    spec = DataSpec(str(data / "sst2.test.tsv"), header=("text", "label"), length=64)
    examples = read_examples("classification", spec, load_tokenizer(source), ["0", "1"])
    rows = RowModel(model, model, "classification", fused=False)
    return value("classification", score(rows, examples, pad_id=0, batch_size=32))


def depth(args: argparse.Namespace) -> str:
    student = args.work / "depth"
    compressor(
        "distill", args.model, "-o", student, "--student", f"derive:layers={args.layers}", "--data", args.train,
        "--test-data", args.test, "--length", 256, "--test-samples", 32, "--evaluate-samples", 8, "--time-budget", args.minutes, "--lr", args.learning_rate, "--batch-size", 4,
        "--micro-batch", 4, "--dtype", args.dtype, "--device", "cpu", "--overwrite",
    )  # fmt: skip
    return table(student)


def recover(args: argparse.Namespace) -> str:
    start = args.work / f"{args.scheme}-{args.method}"
    student = args.work / f"{start.name}-recovered"
    if not start.exists():
        compressor(
            "quantize", args.model, "-o", start, "--scheme", args.scheme, "--method", args.method, "--data", args.train, "--samples",
            32, "--sequence-length", 256, "--device", "cpu",
        )  # fmt: skip
    compressor(
        "distill", args.model, "-o", student, "--student", f"quantized:{start}", "--data", args.train, "--test-data", args.test,
        "--length", 256, "--test-samples", 32, "--evaluate-samples", 8, "--time-budget", args.minutes, "--batch-size", 4,
        "--micro-batch", 4, "--dtype", args.dtype, "--device", "cpu", "--overwrite",
    )  # fmt: skip
    arms = json.loads((student / "report.json").read_text("utf-8"))["distillation"]["arms"]
    before, after = (arms[name]["metrics"]["kl"]["value"] for name in ("before", "after"))
    return f"{table(student)}\nKL {before:.4f} → {after:.4f} nats/token, {after / before:.2f} of what it was"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("step", "sst2", "depth", "recover"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, help="directory of sst2.{train,dev,test}.tsv")
    parser.add_argument("--train", help="training text")
    parser.add_argument("--test", help="test text")
    parser.add_argument("--work", type=Path, default=Path("bench-distill"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks_distill.md"))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--teacher-epochs", type=int, default=3)
    parser.add_argument("--augment", type=int, default=9, help="of sst2")
    parser.add_argument("--epochs", type=int, default=1, help="of sst2, over the augmented data")
    parser.add_argument("--scheme", default="w3g32")
    parser.add_argument("--method", default="gptq", help="of the checkpoint to recover")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of depth")
    parser.add_argument(
        "--dtype", default="float32", help="bfloat16 is faster on processors that multiply it"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Any] = {"step": step, "sst2": sst2, "depth": depth, "recover": recover}
    text = runs[args.what](args)
    with args.output.open("a", encoding="utf-8") as stream:
        stream.write(f"### {args.what}\n\n{text}\n\n")
    print(text)


if __name__ == "__main__":
    main()
