"""How fast a checkpoint is, measured in a process of its own: ``python -m compressor.distillation.latency DIR …``.

What is timed is the artifact as a user would reload it, on random ids without padding.
"""

import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from compressor.evaluation.bootstrap import Estimate


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one forward pass of ``batch`` × ``length`` tokens, and what that makes a second.

    ``stderr_ms`` is the standard error of the mean pass.
    """

    batch: int
    length: int
    p50_ms: float
    p95_ms: float
    items_per_second: float
    runs: int
    device: str
    dtype: str
    threads: int
    stderr_ms: float


def speedup(before: Latency, after: Latency) -> Estimate:
    """Throughput of ``after`` ÷ ``before`` with its 95 % interval: normal in the logarithm, where the relative standard
    errors of both mean times add in squares (the delta method)."""
    ratio = after.items_per_second / before.items_per_second
    relative = [lat.stderr_ms * lat.items_per_second / (1e3 * lat.batch) for lat in (before, after)]
    spread = math.exp(1.96 * math.hypot(*relative))
    return Estimate(ratio, ratio / spread, ratio * spread)


def batch_means_stderr(times: list[float]) -> float:
    """Standard error of the mean of ``times``, whose neighbours are alike: from the means of up to ten stretches of
    consecutive ones (batch means; Law, Simulation Modeling and Analysis, section 9.5.3)."""
    means = [float(part.mean()) for part in np.array_split(np.asarray(times), min(10, len(times)))]
    return float(np.std(means, ddof=1) / np.sqrt(len(means)))


def measure_latency(
    directory: Path, task: str, *, batch: int, length: int, device: str, dtype: str, seconds: float = 8.0
) -> Latency:
    """Reload ``directory`` in a fresh process and time it for about ``seconds``."""
    command = [
        sys.executable, "-m", "compressor.distillation.latency", str(directory), task, str(batch), str(length), device,
        dtype, str(seconds),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{directory}: the reloaded model does not run ({reason})")
    return Latency(**json.loads(done.stdout.strip().splitlines()[-1]))


def _main(directory: str, task: str, batch: str, length: str, device: str, dtype: str, seconds: str) -> None:
    import torch

    from compressor.distillation.models import load_model
    from compressor.sources.model import open_model

    source = open_model(directory, allow_quantized=True)
    model = load_model(source, task, device=device, arguments={"dtype": getattr(torch, dtype)})  # type: ignore[arg-type]
    torch.manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (int(batch), int(length)), device=device)
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    times: list[float] = []
    with torch.inference_mode():
        started = time.monotonic()
        while len(times) < 13 or (time.monotonic() - started < float(seconds) and len(times) < 500):
            at = time.perf_counter()
            model(**inputs)
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - at)
    times = times[3:]
    p50, p95 = np.percentile(times, [50, 95])
    result = Latency(
        int(batch), int(length), 1e3 * float(p50), 1e3 * float(p95), int(batch) / float(np.mean(times)), len(times),
        device, dtype, torch.get_num_threads(), 1e3 * batch_means_stderr(times),
    )  # fmt: skip
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
