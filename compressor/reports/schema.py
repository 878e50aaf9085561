"""The report: one JSON document that people, CI and later tools read.

``schema_version`` is ``major.minor``: the minor number grows when optional keys are added, the major
one when a key changes meaning or goes away. Readers of 2.x may ignore keys they do not know; this
writer never emits any. Every section that a command has nothing to say about is null. The published schema is
``compressor/schemas/report.schema.json``.

2.0: retention and speedup of a distillation are estimates with intervals; gates of all commands are in ``gate``; the
scan and the plan, greedy generations, speed and the standard error of timings were added.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_VERSION: Literal["2.0"] = "2.0"


class Section(BaseModel):
    """Base of all parts of a report: unknown keys are errors, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, facts: "DataclassInstance") -> Self:
        """The section with the fields of a dataclass of the same shape (nested ones included)."""
        return cls.model_validate(asdict(facts))


class Estimate(Section):
    """A value with its 95 % confidence interval; both ends are null when it cannot be computed (one sequence)."""

    value: FiniteFloat
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None


class Metric(Section):
    """One measured quantity.

    ``change`` is compressed − baseline, ``ratio`` compressed ÷ baseline, with paired intervals. Metrics
    that compare both models (KL, agreement, cosine) have ``compressed`` only.
    """

    unit: str
    better: Literal["lower", "higher"]
    compressed: Estimate
    baseline: Estimate | None = None
    change: Estimate | None = None
    ratio: Estimate | None = None
    quantiles: dict[str, FiniteFloat] | None = None


class Environment(Section):
    """Software and machine of a measurement. ``threads``: CPU threads of one torch operation."""

    versions: dict[str, str]
    platform: str
    device: str
    device_name: str
    threads: int
    memory_bytes: int


class Tool(Section):
    """The command that made the report. ``created`` is UTC, ISO 8601; ``arguments`` hold resolved values."""

    name: Literal["compressor"] = "compressor"
    version: str
    command: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    seed: int
    created: str
    seconds: FiniteFloat
    environment: Environment


class WeightFile(Section):
    """A safetensors file; ``header_sha256`` covers its names, shapes, dtypes and offsets, not the weights."""

    name: str
    bytes: int
    header_sha256: str


class Model(Section):
    """A checkpoint as stored. ``bits_per_weight`` is 8 × bytes of all weight files ÷ parameters."""

    ref: str
    path: str
    revision: str | None = None
    architecture: str | None = None
    quantization: str | None = None
    bytes: int
    parameters: int
    bits_per_weight: FiniteFloat
    files: list[WeightFile]


class Coverage(Section):
    """How much of what could be quantized was: parameters, and ``fraction`` = quantized ÷ eligible."""

    quantized_parameters: int
    eligible_parameters: int
    fraction: FiniteFloat


class Data(Section):
    """A data set as it was used.

    ``rows_*`` count rows of the data set; ``rows_truncated`` were cut to ``sequence_length`` tokens.
    ``tokens`` are real ones, padding excluded. ``requested`` sequences were asked for. ``packing``:
    ``concat`` cuts equal windows that do not overlap from the joined rows, ``rows`` makes one sequence
    of a row. ``sha256`` is over the usable rows.
    """

    source: str
    rows_read: int
    rows_used: int
    rows_dropped: int
    rows_truncated: int
    sequences: int
    tokens: int
    requested: int
    sequence_length: int
    packing: Literal["concat", "rows"]
    bos: Literal["added", "none", "already present"]
    sha256: str
    warnings: list[str] = Field(default_factory=list)


class Layer(Section):
    """What happened to one module, in the order it was processed.

    ``error_before`` (rounded to nearest) and ``error_after`` (GPTQ) are in the unit that the quantization section
    names, on the layer's own inputs; ``block_error_before`` and ``block_error_after`` are shares of the whole block's
    output energy around a reconstruction, on sequences that it did not learn from. ``tokens`` reached the layer. A
    module that was left alone has a ``skipped`` reason and no method.
    """

    module: str
    unit: str | None = None
    format: str | None = None
    method: str | None = None
    bits: FiniteFloat | None = None
    parameters: int | None = None
    bytes: int | None = None
    error_before: FiniteFloat | None = None
    error_after: FiniteFloat | None = None
    block_error_before: FiniteFloat | None = None
    block_error_after: FiniteFloat | None = None
    tokens: int | None = None
    damping: FiniteFloat | None = None
    seconds: FiniteFloat | None = None
    skipped: str | None = None
    notes: list[str] = Field(default_factory=list)


class Quantization(Section):
    """How the artifact was made. ``settings`` are the method's resolved options."""

    scheme: str | None = None
    method: str
    settings: dict[str, Any] = Field(default_factory=dict)
    calibration: Data | None = None
    error_unit: str | None = None
    seconds: FiniteFloat
    peak_memory_bytes: int | None = None
    layers: list[Layer] = Field(default_factory=list)


class Generation(Section):
    """One prompt continued greedily by both models; ``same_tokens`` is how many new tokens agree before the first that
    does not, of ``new_tokens`` at most."""

    prompt: str
    compressed: str
    baseline: str | None = None
    same_tokens: int | None = None
    new_tokens: int


class Evaluation(Section):
    """Quality of the compressed model on one data set.

    ``metrics`` by name: ``perplexity``, ``nll``, ``kl`` (KL(original ‖ compressed)) and ``top1_agreement``
    for language models, ``cosine`` and ``neighbour_agreement`` for encoders. ``window`` and ``stride`` are
    in tokens: they are equal, as windows do not overlap. ``tokens`` is what was scored. ``confidence`` is the level of all intervals, by paired bootstrap over sequences.
    """

    task: Literal["causal-lm", "masked-lm", "embedding"]
    metrics: dict[str, Metric]
    data: Data
    window: int
    stride: int
    sequences: int
    tokens: int
    batch_size: int
    dtype: str
    device: str
    attention: str | None = None
    pooling: str | None = None
    confidence: FiniteFloat
    resamples: int
    seed: int
    seconds: FiniteFloat
    notes: list[str] = Field(default_factory=list)
    generations: list[Generation] = Field(default_factory=list)


class Check(Section):
    """One verification result in one line."""

    name: str
    passed: bool
    detail: str = ""


class Verification(Section):
    """Proof that the artifact is what was planned; ``passed`` when every check did."""

    passed: bool
    checks: list[Check]


class Timing(Section):
    """Forward passes of ``batch`` × ``length`` tokens by the artifact, reloaded in a process of its own.

    ``stderr_ms`` is the standard error of their mean time, from the means of consecutive runs.
    """

    batch: int
    length: int
    p50_ms: FiniteFloat
    p95_ms: FiniteFloat
    items_per_second: FiniteFloat
    stderr_ms: FiniteFloat | None = None
    runs: int
    device: str
    dtype: str
    threads: int


class Times(Section):
    """Milliseconds of an inference's part, and the tokens a second that its median makes."""

    p50_ms: FiniteFloat
    p95_ms: FiniteFloat
    p99_ms: FiniteFloat
    tokens_per_second: FiniteFloat


class Growth(Section):
    """How a memory counter moves from one inference to the next: a robust slope in its unit (tensors or bytes) a run, with
    a 99 % interval. ``leak``: it grows for certain."""

    counter: str
    slope: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    leak: bool


class SpeedArm(Section):
    """One model, in a process of its own. ``prefill`` is until the first token (a forward pass of an encoder), ``decode``
    each later token. ``peak_memory_bytes`` is of inference, weights included: of the GPU's allocator, or of the process."""

    prefill: Times
    decode: Times | None = None
    warmup_seconds: FiniteFloat
    peak_memory_bytes: int | None = None
    growth: list[Growth] = Field(default_factory=list)


class Speed(Section):
    """Both models in turns, ``rounds`` inferences each of ``batch`` prompts of ``prompt_length`` tokens with
    ``new_tokens`` generated after them. ``arms``: ``baseline`` and ``compressed``; speedups are the median of baseline ÷
    compressed time over the rounds, with a 95 % interval."""

    engine: str
    batch: int
    prompt_length: int
    new_tokens: int
    compile: Literal["none", "reduce-overhead", "max-autotune"]
    rounds: int
    warmup: int
    leak_runs: int
    device: str
    dtype: str
    threads: int
    arms: dict[str, SpeedArm]
    prefill_speedup: Estimate | None = None
    decode_speedup: Estimate | None = None
    notes: list[str] = Field(default_factory=list)


class DistillationArm(Section):
    """One of the models that a distillation compares; ``kl`` and ``agreement`` are with the teacher."""

    ref: str
    parameters: int
    bytes: int
    metrics: dict[str, Estimate]
    latency: Timing | None = None


class DistillationData(Section):
    """Examples as they were used; ``sha256`` covers their tokens and labels."""

    source: str
    examples: int
    truncated: int
    sha256: str


class DistillationPoint(Section):
    """The student on the evaluation data after ``step`` steps; losses are means per row since the point before."""

    step: int
    seconds: FiniteFloat
    metric: FiniteFloat | None = None
    learning_rate: FiniteFloat = 0.0
    loss: FiniteFloat | None = None
    kd: FiniteFloat | None = None
    ce: FiniteFloat | None = None


class Distillation(Section):
    """How the student was taught and what came of it.

    ``arms``: ``teacher``, ``before`` and ``after`` training, and ``control``, the same student after as many steps
    on the labels alone. ``retention`` is the student's ``metric`` ÷ the teacher's (inverted where less is
    better; null when the teacher's is 0), ``recovery`` the share of what deriving had cost that came back (of log perplexity, for
    perplexity), ``gain_over_control`` in the metric's unit, positive when better. ``curve`` is in ``curve_metric``, by
    which the best student was chosen.
    """

    task: str
    metric: str
    better: Literal["lower", "higher"]
    loss: str
    arms: dict[str, DistillationArm]
    retention: Estimate | None = None
    recovery: FiniteFloat | None = None
    speedup: Estimate | None = None
    gain_over_control: Estimate | None = None
    steps: int
    best_step: int
    rows: int
    training_seconds: FiniteFloat
    curve_metric: str
    curve: list[DistillationPoint]
    control_curve: list[DistillationPoint] = Field(default_factory=list)
    data: dict[str, DistillationData]


class UnitDamage(Section):
    """What the scan predicts for one unit, by format; ``block`` counts from 0."""

    unit: str
    kind: str
    block: int
    damage: dict[str, FiniteFloat]


class Scan(Section):
    """Sensitivity of every unit in every format. ``unit`` names what ``damage`` is in."""

    score: str
    unit: str
    formats: list[str]
    tokens: int
    units: list[UnitDamage]


class PlanPoint(Section):
    """One whole plan: bits a weight in the units, bytes of the checkpoint, predicted and perhaps measured KL in nats per
    token. ``stderr`` is the measured one's standard error over sequences."""

    bits: FiniteFloat
    bytes: int
    predicted: FiniteFloat | None = None
    measured: FiniteFloat | None = None
    stderr: FiniteFloat | None = None


class Planning(Section):
    """The plan that was carried out, among others: ``frontier`` are the cheapest plans of all sizes, ``measured`` those
    whose KL corrected the prediction."""

    budget: str
    chosen: PlanPoint
    calibrated: bool
    frontier: list[PlanPoint] = Field(default_factory=list)
    measured: list[PlanPoint] = Field(default_factory=list)


class GateResult(Section):
    """One threshold. ``outcome`` compares it with the 95 % interval of ``value``: inconclusive when it lies inside, or
    when a sampled value has none."""

    name: str
    label: str
    unit: str
    limit: Literal["max", "min"]
    threshold: FiniteFloat
    value: Estimate
    exact: bool
    outcome: Literal["pass", "fail", "inconclusive"]


class Gate(Section):
    """All thresholds; ``passed`` takes ``on_inconclusive`` into account."""

    passed: bool
    on_inconclusive: Literal["fail", "pass", "warn"]
    results: list[GateResult]


class Report(Section):
    """Everything one command found out about one compressed model."""

    schema_version: Literal["2.0"] = SCHEMA_VERSION
    tool: Tool
    source: Model | None = None
    artifact: Model | None = None
    gate: Gate | None = None
    distillation: Distillation | None = None
    scan: Scan | None = None
    planning: Planning | None = None
    coverage: Coverage | None = None
    quantization: Quantization | None = None
    evaluation: Evaluation | None = None
    speed: Speed | None = None
    verification: Verification | None = None
    warnings: list[str] = Field(default_factory=list)
