"""How fast checkpoints are: both models in turns, in one run, so that whatever slows the machine slows both.

Ratios are of the two inferences of one round; their median has a distribution-free interval (of the order statistics,
``scipy.stats.quantile_test``), since times have outliers and no normal distribution.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from compressor.console import steps
from compressor.errors import UsageError
from compressor.evaluation.bootstrap import Estimate
from compressor.evaluation.leak import Growth, growths
from compressor.evaluation.load import Task
from compressor.evaluation.speed_worker import Sample, Workload
from compressor.evaluation.workers import transformers_workers, vllm_workers
from compressor.sources.model import Source, longest_sequence


@dataclass(frozen=True)
class SpeedSettings:
    """``warmup`` inferences are not counted; ``leak_runs`` more follow the timed ones (0 for none)."""

    batch: int = 1
    prompt_length: int = 128
    new_tokens: int = 32
    compile: str = "none"
    rounds: int = 20
    warmup: int = 3
    leak_runs: int = 30


@dataclass(frozen=True)
class Times:
    """Milliseconds, and the tokens a second that the median makes."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class SpeedArm:
    """One model. ``prefill`` is until the first token (a forward pass of an encoder), ``decode`` each later token.
    ``warmup_seconds`` include compilation; ``peak_memory_bytes`` is of inference, weights included."""

    prefill: Times
    decode: Times | None
    warmup_seconds: float
    peak_memory_bytes: int | None
    growth: tuple[Growth, ...]


@dataclass(frozen=True)
class Speed:
    """``arms`` are ``baseline`` (if there is one) and ``compressed``; speedups are baseline time ÷ compressed time."""

    engine: str
    batch: int
    prompt_length: int
    new_tokens: int
    compile: str
    rounds: int
    warmup: int
    leak_runs: int
    device: str
    dtype: str
    threads: int
    arms: dict[str, SpeedArm]
    prefill_speedup: Estimate | None
    decode_speedup: Estimate | None
    notes: tuple[str, ...]


def check_settings(settings: SpeedSettings, source: Source, task: Task, engine: str) -> None:
    """Raise UsageError for what cannot be measured."""
    if engine not in ("transformers", "vllm"):
        raise UsageError(f"--engine {engine}: use transformers or vllm")
    if engine == "vllm" and task != "causal-lm":
        raise UsageError(f"--engine vllm: times models that generate text, and {source.ref} does not")
    if engine == "vllm" and settings.compile == "max-autotune":
        raise UsageError(
            "--compile max-autotune: is for transformers; reduce-overhead lets vllm compile as it does by itself"
        )
    if settings.compile not in ("none", "reduce-overhead", "max-autotune"):
        raise UsageError(f"--compile {settings.compile}: use none, reduce-overhead or max-autotune")
    if 0 < settings.leak_runs < 9:
        raise UsageError(
            f"--leak-runs {settings.leak_runs}: at least 9 tell a leak from chance (0 for no check)"
        )
    if task == "causal-lm" and settings.new_tokens < 2:
        raise UsageError(
            f"--new-tokens {settings.new_tokens}: at least 2 are needed to time one after the first"
        )
    longest = longest_sequence(source.config)
    wanted = settings.prompt_length + (settings.new_tokens if task == "causal-lm" else 0)
    if longest is not None and wanted > longest:
        raise UsageError(
            f"--prompt-length {settings.prompt_length}: with the new tokens that makes {wanted}, and {source.ref} takes at "
            f"most {longest}"
        )


def measure_speed(
    baseline: Source | None,
    compressed: Source,
    task: Task,
    settings: SpeedSettings,
    *,
    device: str,
    dtype: str,
    seed: int,
    vllm_python: Path | None = None,
) -> Speed:
    """Time both models in turns, each in a process of its own: in transformers, or in the vLLM of ``vllm_python``, which
    takes the models' own dtypes. Raises what loading raises, and MachineLimit when a process cannot run a model."""
    new_tokens = settings.new_tokens if task == "causal-lm" else 0
    workload = Workload(settings.batch, settings.prompt_length, new_tokens, settings.compile, seed)  # type: ignore[arg-type]
    sources = {"baseline": baseline, "compressed": compressed}
    present = {name: source for name, source in sources.items() if source is not None}
    samples: dict[str, list[Sample]] = {name: [] for name in present}
    warm: dict[str, float] = {}
    found_growth: dict[str, tuple[Growth, ...]] = {}
    peaks: dict[str, int | None] = {}
    opened = (
        transformers_workers(present, task, device, dtype, workload)
        if vllm_python is None
        else vllm_workers(present, vllm_python, workload)
    )
    with opened as workers:
        engine = workers["compressed"].engine
        total = len(present) * (1 + settings.rounds + bool(settings.leak_runs))
        with steps("timing", total) as progress:
            for name, worker in workers.items():
                runs = [worker.ask("infer") for _ in range(settings.warmup)]
                warm[name] = sum(run.prefill + sum(run.steps) for run in runs)
                progress.advance(f"warm-up of {name}")
            for number in range(settings.rounds):
                # Who goes first alternates, as the second finds the processor warm.
                for name in list(workers)[:: 1 if number % 2 else -1]:
                    samples[name].append(workers[name].ask("infer"))
                    progress.advance(name)
            for name, worker in workers.items():
                peaks[name] = worker.ask("memory")
                found_growth[name] = ()
                if settings.leak_runs:
                    found_growth[name] = tuple(growths(worker.ask("leak", settings.leak_runs)))
                    progress.advance(f"leak check of {name}")
    arms = {
        name: SpeedArm(
            _times([s.prefill for s in found], settings.batch * settings.prompt_length),
            _times([step for s in found for step in s.steps], settings.batch) if new_tokens else None,
            warm[name],
            peaks[name],
            found_growth[name],
        )
        for name, found in samples.items()
    }
    notes = []
    if (
        vllm_python is None
        and (compressed.config.get("quantization_config") or {}).get("quant_method") == "compressed-tensors"
    ):
        notes.append(
            "transformers unpacks the weights of this checkpoint, so a gain is seen in an engine with kernels only"
        )
    both = samples.get("baseline"), samples["compressed"]
    return Speed(
        engine=engine.name,
        batch=settings.batch,
        prompt_length=settings.prompt_length,
        new_tokens=new_tokens,
        compile=settings.compile,
        rounds=settings.rounds,
        warmup=settings.warmup,
        leak_runs=settings.leak_runs,
        device=device,
        dtype=engine.dtype,
        threads=engine.threads,
        arms=arms,
        prefill_speedup=_ratio(*([s.prefill for s in arm or ()] for arm in both)),
        decode_speedup=_ratio(*([sum(s.steps) for s in arm or ()] for arm in both)) if new_tokens else None,
        notes=tuple(notes),
    )


def _times(seconds: list[float], tokens: int) -> Times:
    p50, p95, p99 = (float(v) for v in np.percentile(seconds, [50, 95, 99]))
    return Times(1e3 * p50, 1e3 * p95, 1e3 * p99, tokens / p50)


def _ratio(baseline: list[float], compressed: list[float]) -> Estimate | None:
    """Median of the paired ratios with its 95 % interval (no ends from fewer than six pairs)."""
    if not baseline:
        return None
    ratios = np.asarray(baseline) / np.asarray(compressed)
    bounds = np.asarray(stats.quantile_test(ratios, p=0.5).confidence_interval(0.95), dtype=np.float64)
    low, high = bounds.tolist() if np.isfinite(bounds).all() else (None, None)
    return Estimate(float(np.median(ratios)), low, high)
