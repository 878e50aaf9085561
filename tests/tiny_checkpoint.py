"""Quantize a tiny model to a checkpoint with absmax rounding: a job small enough to be killed at any moment.

As a script it writes one target after another, and prints how each of them ended:

    python tiny_checkpoint.py SOURCE TARGET...
"""

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.compressed_tensors import encode, quantization_config, scale_dtype
from compressor.checkpoint.coverage import coverage
from compressor.checkpoint.writer import CheckpointWriter
from compressor.errors import CompressorError
from compressor.formats import QuantizedWeight, absmax_scale, parse_format, quantize
from compressor.graph import ModelGraph, Skeleton, build_skeleton, discover
from compressor.graph.assign import uniform_plan
from compressor.plans import Assignment, Plan
from compressor.sources.model import Source, open_model
from compressor.sources.tensors import file_sha256, read_tensor


def make_plan(skeleton: Skeleton, graph: ModelGraph, fmt: str, changes: dict[str, str] | None = None) -> Plan:
    """``fmt`` everywhere, but for the unit kinds in ``changes``."""
    plans = {
        name: uniform_plan(skeleton, graph, parse_format(name)) for name in {fmt, *(changes or {}).values()}
    }
    layers: dict[str, Assignment] = dict(plans[fmt].layers)
    for unit in graph.units:
        if unit.kind in (changes or {}):
            chosen = plans[(changes or {})[unit.kind]]
            layers |= {layer.name: chosen.layers[layer.name] for layer in unit.layers}
    return Plan(model="tiny", layers=layers)


def encode_block(skeleton: Skeleton, graph: ModelGraph, plan: Plan, index: int) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    dtype = scale_dtype(skeleton.dtype)
    for unit in graph.units_of(index):
        for layer in unit.layers:
            fmt = parse_format(plan.layers[layer.name].format)
            if fmt.quantized:
                weight = read_tensor(skeleton.stored[f"{layer.name}.weight"])
                scale = absmax_scale(weight, fmt, dtype)
                tensors |= encode(
                    layer.name, QuantizedWeight(quantize(weight, scale, fmt), scale, fmt), dtype
                )
    return tensors


def make_sidecar(source: Source, skeleton: Skeleton, graph: ModelGraph, plan: Plan) -> dict[str, Any]:
    reasons = {name: assignment.reason for name, assignment in plan.layers.items()}
    return {
        "schema_version": 1,
        "tool": {"name": "compressor", "version": "0"},
        "source": {
            "ref": source.ref,
            "kind": source.kind,
            "revision": None,
            "files": {file.name: file_sha256(file) for file in source.weight_files},
        },
        "plan": plan.model_dump(mode="json", exclude_none=True),
        "settings": {"method": "rtn", "min_coverage": 0.5},
        "layers": [{"module": name} for name in plan.quantized()],
        "coverage": coverage(skeleton, graph, plan.quantized(), reasons).model_dump(),
    }


def write_checkpoint(
    source_path: Path,
    target: Path,
    fmt: str = "w4g32",
    changes: dict[str, str] | None = None,
    *,
    overwrite: bool = False,
    pause: Callable[[], None] = lambda: None,
) -> Path:
    """The whole job; ``pause`` is called between its steps."""
    source = open_model(str(source_path))
    skeleton = build_skeleton(source)
    graph = discover(skeleton)
    plan = make_plan(skeleton, graph, fmt, changes)
    with CheckpointWriter(target, {"format": fmt, "changes": changes}, overwrite) as writer:
        writer.require_space(1)
        for index in range(len(graph.blocks)):
            if index not in writer.finished:
                writer.write_block(index, encode_block(skeleton, graph, plan, index), [{"block": index}])
            pause()
        config = {**source.config, "quantization_config": quantization_config(plan, graph)}
        replaced = {skeleton.stored[f"{name}.weight"].name for name in plan.quantized()}
        writer.finish(source, config, make_sidecar(source, skeleton, graph, plan), replaced)
        pause()
        writer.publish()
    return target


def job(source: Path, target: Path, steps: Connection) -> None:
    """The job as a process of its own: tells ``steps`` where it is, and goes on when it is answered."""
    torch.set_num_threads(1)

    def pause() -> None:
        steps.send("step")
        steps.recv()

    pause()
    write_checkpoint(source, target, pause=pause)


def main() -> None:
    source, *targets = sys.argv[1:]
    for target in targets:
        try:
            write_checkpoint(Path(source), Path(target))
            print("written", flush=True)
        except CompressorError as error:
            print(f"{type(error).__name__} {error.exit_code}: {error}", flush=True)


if __name__ == "__main__":
    main()
