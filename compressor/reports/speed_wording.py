"""How measured speed reads, the same on the terminal and in Markdown."""

from compressor.reports.schema import Estimate, Growth, Speed
from compressor.reports.wording import number, size


def speed_rows(speed: Speed) -> list[list[str]]:
    """Under ``speed_header``: what was timed, baseline, compressed, and how many times as fast."""
    arms = [speed.arms.get(name) for name in ("baseline", "compressed")]

    def row(label: str, cells: list[str], ratio: Estimate | None = None) -> list[str]:
        return [label, *cells, _times(ratio)]

    rows = []
    for part, ratio in (("prefill", speed.prefill_speedup), ("decode", speed.decode_speedup)):
        times = [getattr(arm, part) if arm else None for arm in arms]
        if not any(times):
            continue
        label = part if speed.new_tokens else "forward pass"
        rows.append(
            row(f"{label}, tokens/s", [number(t.tokens_per_second) if t else "–" for t in times], ratio)
        )
        cells = [f"{t.p50_ms:.3g} / {t.p95_ms:.3g} / {t.p99_ms:.3g}" if t else "–" for t in times]
        rows.append(row(f"{label}, p50 / p95 / p99 ms", cells))
    peaks = [arm.peak_memory_bytes if arm else None for arm in arms]
    rows.append(row("peak memory", ["–" if peak is None else size(peak) for peak in peaks]))
    if speed.leak_runs:
        verdicts = [
            "–" if arm is None else "LEAK" if any(g.leak for g in arm.growth) else "none seen" for arm in arms
        ]
        rows.append(row(f"leak in {speed.leak_runs} inferences", verdicts))
    return rows


def _times(ratio: Estimate | None) -> str:
    """``1.82× [1.79, 1.85]``"""
    if ratio is None:
        return "–"
    ends = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.value:.2f}×{ends}"


def speed_header() -> list[str]:
    return ["", "baseline", "compressed", "speedup"]


def speed_facts(speed: Speed) -> str:
    """How it was measured, in one line."""
    threads = "1 thread" if speed.threads == 1 else f"{speed.threads} threads"
    generated = f" + {speed.new_tokens} new" if speed.new_tokens else ""
    return (
        f"{speed.rounds} inferences of {speed.batch} × {speed.prompt_length}{generated} tokens each in turns after "
        f"{speed.warmup} for warm-up, {speed.engine}, compile {speed.compile}, {speed.dtype} on {speed.device}, "
        f"{threads}; speedups are medians of paired ratios with 95 % intervals"
    )


def leak_line(arm: str, found: Growth) -> str:
    """What grows, and how fast."""
    unit = "tensors" if found.counter == "live tensors" else "bytes"
    return (
        f"{arm}: memory leak: {found.counter} grow by {found.slope:,.4g} {unit} an inference "
        f"(99 % interval {found.low:,.4g} to {found.high:,.4g})"
    )
