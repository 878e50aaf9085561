"""Time one product with each unit's matrix in each format on this machine: the cost table of a latency budget.

    python scripts/measure_costs.py sensitivity.json -o costs.json [--tokens 1] [--device cuda]
    compressor plan sensitivity.json --budget latency:12ms --costs costs.json

Every distinct fused shape [out, in] of the scan is timed with PyTorch's own kernels: dense bf16, INT4 groups
(``_weight_int4pack_mm``), INT8 channel weights (``_weight_int8pack_mm``), W8A8 and FP8 with dynamic per-token inputs
(``_int_mm``, ``_scaled_mm``, quantizing the input included). Formats without a kernel here are left out and named. An
engine with other kernels has other times: feed ``plan`` a file of the same form with those.

Times are medians. Weights are cycled through copies larger than the caches, as they come from memory when a whole model
runs; on a GPU, CUDA events time a batch of launches, so that launch gaps are hidden as in a captured graph.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.formats import Format, parse_format
from compressor.sensitivity.schema import read_sensitivity

_CACHE_BYTES = 128 * 2**20  # more than the last-level cache of the machines this is run on
_COPIES = 64
_ROUNDS = 9

Product = Callable[[Tensor], Tensor]


def main() -> None:
    arguments = _arguments()
    device = torch.device(arguments.device)
    scan = read_sensitivity(arguments.sensitivity)
    shapes = sorted(
        {
            (sum(layer.out_features for layer in unit.layers), unit.layers[0].in_features)
            for unit in scan.units
        }
    )
    entries: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for out_features, in_features in shapes:
        for name in scan.formats:
            fmt = parse_format(name)
            if not fmt.fits(in_features) or name in missing:
                continue
            try:
                seconds = _time(fmt, out_features, in_features, arguments.tokens, device)
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                missing[name] = str(error).splitlines()[0]
                continue
            entries.append(
                {"out_features": out_features, "in_features": in_features, "format": name, "seconds": seconds}
            )
            print(f"[{out_features}, {in_features}] {name}: {seconds * 1e6:.1f} us", flush=True)
    for name, reason in missing.items():
        print(f"{name}: not timed: {reason}")
    table = {
        "artifact": "costs",
        "version": 1,
        "engine": "torch",
        "tokens": arguments.tokens,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "entries": [entry for entry in entries if entry["format"] not in missing],
    }
    arguments.output.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    print(f"{arguments.output}: {len(table['entries'])} times")


def _time(fmt: Format, out_features: int, in_features: int, tokens: int, device: torch.device) -> float:
    """Median seconds of one product."""
    torch.manual_seed(0)
    x = torch.randn(tokens, in_features, dtype=torch.bfloat16, device=device)
    size = out_features * in_features * fmt.bits // 8
    copies = max(1, min(_COPIES, -(-_CACHE_BYTES // size)))
    products = [_product(fmt, out_features, in_features, device) for _ in range(copies)]
    repeats = max(1, 64 // copies)

    def run() -> None:
        for _ in range(repeats):
            for product in products:
                product(x)

    run()
    times = []
    for _ in range(_ROUNDS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            elapsed = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            run()
            elapsed = time.perf_counter() - begin
        times.append(elapsed / (repeats * copies))
    return statistics.median(times)


def _product(fmt: Format, out_features: int, in_features: int, device: torch.device) -> Product:
    """x [tokens, in] bf16 times a random matrix of this format. Raises RuntimeError where torch has no kernel."""
    if not fmt.quantized:
        weight = torch.randn(out_features, in_features, dtype=torch.bfloat16, device=device)
        return lambda x: torch.nn.functional.linear(x, weight)
    if fmt.kind == "fp8":
        fp8 = torch.randn(out_features, in_features, device=device).to(torch.float8_e4m3fn)
        scale = torch.ones(1, out_features, device=device)

        def scaled(x: Tensor) -> Tensor:
            step = x.abs().amax(-1, keepdim=True).float() / 448
            return torch._scaled_mm(
                (x / step).to(torch.float8_e4m3fn),
                fp8.t(),
                scale_a=step,
                scale_b=scale,
                out_dtype=torch.bfloat16,
            )

        return scaled
    if fmt.activations == "int8":
        codes = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8, device=device)
        channel = torch.rand(out_features, device=device)
        rows = 17 if device.type == "cuda" else 1  # cuBLAS wants more than 16

        def dynamic(x: Tensor) -> Tensor:
            step = x.abs().amax(-1, keepdim=True).float() / 127.5
            q = (x / step).round().clamp(-128, 127).to(torch.int8)
            if len(q) < rows:
                q = torch.nn.functional.pad(q, (0, 0, 0, rows - len(q)))
            return (torch._int_mm(q, codes.t())[: len(x)] * step * channel).to(torch.bfloat16)

        return dynamic
    if fmt.bits == 8 and fmt.group_size is None:
        int8 = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8, device=device)
        scales = torch.rand(out_features, dtype=torch.bfloat16, device=device)
        return lambda x: torch._weight_int8pack_mm(x, int8, scales)
    if fmt.bits == 4 and fmt.group_size is not None:
        group = fmt.group_size
        zeros = torch.rand(in_features // group, out_features, 2, dtype=torch.bfloat16, device=device)
        if device.type == "cuda":
            pairs = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
            return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, group, zeros)
        nibbles = torch.randint(0, 16, (out_features, in_features), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, zeros)
    raise NotImplementedError(f"torch has no kernel for {fmt}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sensitivity", type=Path, help="what scan-sensitivity wrote: its shapes and formats are timed"
    )
    parser.add_argument("--output", "-o", type=Path, default=Path("costs.json"))
    parser.add_argument("--tokens", type=int, default=1, help="1 is decoding, hundreds are prefill")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
