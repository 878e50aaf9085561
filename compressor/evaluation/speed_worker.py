"""One model in a process of its own, which runs inferences when asked: so that memory and leaks are its alone.

The process takes turns with that of the other model, and waits without work in between.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from compressor.errors import CompressorError
from compressor.evaluation.alive import collect, peak_memory, reset_peak
from compressor.evaluation.load import Task, load_for_evaluation, quiet

Compile = Literal["none", "reduce-overhead", "max-autotune"]


@dataclass(frozen=True)
class Workload:
    """An inference: a batch of random prompts, and tokens generated after them (none for encoders)."""

    batch: int
    prompt_length: int
    new_tokens: int
    compile: Compile
    seed: int


@dataclass(frozen=True)
class Engine:
    """What runs the inferences."""

    name: str
    dtype: str
    threads: int


@dataclass
class Sample:
    """Seconds of one inference: until the first token, and of each later one."""

    prefill: float = 0.0
    steps: list[float] = field(default_factory=list)


def serve(connection: Connection, path: Path, task: Task, device: str, dtype: str, trust: bool, threads: int,
          workload: Workload) -> None:  # fmt: skip
    """Load the model, then answer ``infer``, ``memory`` and ``leak`` until the other end closes."""
    try:
        torch.set_num_threads(threads)
        # A simulated cache would be timed for what it is not: a slower one.
        model = load_for_evaluation(
            path, dtype=dtype, device=device, trust_remote_code=trust, simulate_cache=False
        )
        run = inference(model, task, workload)
        reset_peak(torch.device(device))
        engine = f"transformers {transformers.__version__}"
        connection.send(("ready", Engine(engine, dtype, torch.get_num_threads())))
        while True:
            request, argument = connection.recv()
            answer: Any
            if request == "infer":
                answer = run()
            elif request == "memory":
                answer = peak_memory(torch.device(device))
            else:
                answer = collect(run, argument, torch.device(device))
            connection.send(("done", answer))
    except EOFError:
        return
    except CompressorError as error:
        connection.send(("refused", (type(error), str(error))))
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))


def inference(model: Any, task: Task, workload: Workload) -> Callable[[], Sample]:
    """A function that runs one inference and times it.

    Decoders run transformers' own ``generate``, greedily and to the full length; compiled, with a static cache.
    Encoders run one forward pass.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (workload.batch, workload.prompt_length)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, shape, generator=generator).to(device)
    if task == "causal-lm":
        return _generation(model, ids, workload)
    if workload.compile != "none":
        model.forward = torch.compile(model.forward, mode=workload.compile)

    def forward() -> Sample:
        with torch.inference_mode():
            start = _now(device)
            model(input_ids=ids)
            return Sample(_now(device) - start)

    return forward


class _Stamps:
    """A logits processor that notes when each token's logits are there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(_now(self.device))
        return scores


def _generation(model: Any, ids: Tensor, workload: Workload) -> Callable[[], Sample]:
    settings: dict[str, Any] = {}
    if workload.compile != "none":
        compiling = transformers.CompileConfig(mode=workload.compile)
        vars(compiling)["_compile_all_devices"] = True  # on CPUs too: it was asked for
        settings = {"cache_implementation": "static", "compile_config": compiling}
    config = transformers.GenerationConfig(
        max_new_tokens=workload.new_tokens,
        min_new_tokens=workload.new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        **settings,
    )
    # Else its own file's settings (sampling, ends of text, forced tokens) are merged into ours.
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def generate() -> Sample:
        stamps = _Stamps(ids.device)
        with quiet(), torch.inference_mode():
            start = _now(ids.device)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=transformers.LogitsProcessorList([stamps]),
            )
        times = stamps.times
        return Sample(times[0] - start, [b - a for a, b in pairwise(times)])

    return generate


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
