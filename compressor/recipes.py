"""Recipes: a whole run in one YAML file, validated before anything starts.

Unknown keys and wrong types are refused, naming file, line and key. Values given on the command line
win over the recipe's, and the recipe's over the defaults below.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from compressor.errors import UsageError
from compressor.formats import parse_format
from compressor.plans import line_of

Packing = Literal["auto", "concat", "rows"]
Method = Literal["rtn", "gptq", "adaround", "auto"]


def _minutes(value: Any) -> Any:
    """Minutes from "90s", "10m" or "1.5h"; anything else as it is."""
    units = {"s": 1 / 60, "m": 1.0, "h": 60.0}
    if isinstance(value, str) and value and value[-1] in units:
        try:
            return float(value[:-1]) * units[value[-1]]
        except ValueError:
            raise ValueError(f"{value}: write a time as 90s, 10m or 1.5h") from None
    return value


def _share(value: Any) -> Any:
    """A fraction from "2%"; anything else as it is."""
    if isinstance(value, str) and value.endswith("%"):
        try:
            return float(value[:-1]) / 100
        except ValueError:
            raise ValueError(f"{value}: write a share as 2% or 0.02") from None
    return value


def _bytes(value: Any) -> Any:
    """Bytes from "120MB" or "1.5 GB" (decimal units); anything else as it is."""
    if isinstance(value, str):
        for unit, factor in {"kB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}.items():
            if value.lower().endswith(unit.lower()):
                try:
                    return round(float(value[: -len(unit)]) * factor)
                except ValueError:
                    raise ValueError(f"{value}: write a size as 120MB or 120000000") from None
    return value


Minutes = Annotated[float, BeforeValidator(_minutes), Field(gt=0)]
Share = Annotated[float, BeforeValidator(_share), Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataRecipe(_Strict):
    """Where text comes from and how much of it is used; lengths are in tokens."""

    data: str = "builtin"
    column: str | None = None
    split: str | None = None
    samples: Annotated[int, Field(ge=1)] = 128
    sequence_length: Annotated[int, Field(ge=8)] = 512
    packing: Packing = "auto"


class AdaRoundRecipe(_Strict):
    """Block reconstruction after GPTQ: ``iterations`` steps a block, each on ``batch`` sequences; ``value_rate`` is in
    steps of the grid, ``scale_rate`` relative to the scale."""

    iterations: Annotated[int, Field(ge=1)] = 100
    batch: Annotated[int, Field(ge=1)] = 8
    value_rate: Annotated[float, Field(ge=0, le=1)] = 0.003
    scale_rate: Annotated[float, Field(ge=0, le=0.1)] = 0.006


# What the outputs other than compressed-tensors can be quantized to.
_OTHER_SCHEMES = {"bitsandbytes": ("nf4", "int8"), "onnx": ("int8",)}


class QuantizeRecipe(_Strict):
    """How to quantize: one ``scheme`` for every layer, or a ``plan`` file.

    ``scales`` chooses between searched (mse) and absmax scales for rtn; ``damping`` is GPTQ's, relative
    to the Hessian's mean diagonal; ``min_coverage`` is the share of eligible parameters that must end up
    quantized, below which the run fails. ``format`` is another output: bitsandbytes with the schemes nf4 and int8, onnx with
    int8. ``kv_cache: fp8`` adds calibrated scales for keys and values. ``method: auto`` takes the best method that is
    estimated to fit in ``time_budget`` ("10m", "90s", "1.5h", or a number of minutes).
    """

    format: Literal["compressed-tensors", "bitsandbytes", "onnx"] = "compressed-tensors"
    scheme: str = "w4g128"
    plan: Path | None = None
    kv_cache: Literal["fp8"] | None = None
    method: Method = "gptq"
    scales: Literal["mse", "absmax"] = "mse"
    damping: Annotated[float, Field(gt=0, le=1)] = 0.01
    adaround: AdaRoundRecipe = AdaRoundRecipe()
    time_budget: Minutes | None = None
    ignore: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    strict: bool = False
    min_coverage: Annotated[float, Field(ge=0, le=1)] = 0.0
    engine: str | None = None
    calibration: DataRecipe = DataRecipe()
    calibration_memory: Annotated[float, Field(gt=0)] = 1.5  # GiB of activations at once

    @model_validator(mode="after")
    def _has_a_budget(self) -> "QuantizeRecipe":
        if (self.method == "auto") != (self.time_budget is not None):
            raise ValueError("method auto and time_budget belong together")
        return self

    @field_validator("format", mode="before")
    @classmethod
    def _written(cls, value: Any) -> Any:
        if value == "gguf":
            raise ValueError(
                "compressor writes no gguf: run llama.cpp's convert_hf_to_gguf.py on the original model, then its llama-quantize"
            )
        return value

    @field_validator("scheme")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        chosen = info.data.get("format")
        if chosen in _OTHER_SCHEMES:
            schemes = _OTHER_SCHEMES[chosen]
            if value not in schemes:
                raise ValueError(f"{value}: format {chosen} has {' and '.join(schemes)}")
            return value
        try:
            return parse_format(value).name
        except UsageError as error:
            raise ValueError(str(error)) from None


class ScanRecipe(_Strict):
    """How ``scan-sensitivity`` scores units × ``formats`` before a plan is made; ``draws`` are random directions
    for each sequence."""

    formats: tuple[str, ...] = ("w4g128", "w4g64", "w4g32", "w8", "bf16")
    score: Literal["fisher", "measured"] = "fisher"
    rounding: Literal["rtn", "gptq"] = "rtn"
    draws: Annotated[int, Field(ge=1)] = 4
    data: DataRecipe = DataRecipe(samples=32, sequence_length=256)

    @field_validator("formats")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(parse_format(name).name for name in value)
        except UsageError as error:
            raise ValueError(str(error)) from None


class PlanRecipe(_Strict):
    """How ``plan`` spends the ``budget``: rules, a cost table or GPU for latency, whole plans to ``measure``."""

    budget: str
    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    floor: tuple[str, ...] = ()
    interactions: bool = True
    costs: Path | None = None
    gpu: str | None = None
    measure: Annotated[int, Field(ge=0)] = 0


class VerifyRecipe(_Strict):
    """Which engine to start on the finished checkpoint, besides the checks that always run."""

    engine: Literal["transformers", "vllm"] | None = "transformers"
    engine_python: Path | None = None


class LatencyRecipe(_Strict):
    """How fast the checkpoint is beside its original, in ``engine``: ``rounds`` timed inferences of each model in turns
    after ``warmup`` others, each of ``batch`` prompts of ``prompt_length`` tokens with ``new_tokens`` generated;
    ``leak_runs`` more (0 for none) must not make memory grow. ``engine_python`` is the Python that has vllm."""

    engine: Literal["transformers", "vllm"] = "transformers"
    engine_python: Path | None = None
    batch: Annotated[int, Field(ge=1)] = 1
    prompt_length: Annotated[int, Field(ge=1)] = 128
    new_tokens: Annotated[int, Field(ge=2)] = 32
    compile: Literal["none", "reduce-overhead", "max-autotune"] = "none"
    rounds: Annotated[int, Field(ge=1)] = 20
    warmup: Annotated[int, Field(ge=1)] = 3
    leak_runs: Annotated[int, Field(ge=0)] = 30


class EvaluateRecipe(_Strict):
    """Text for perplexity, KL and agreement; lengths are in tokens. ``generations`` sequences are also continued greedily
    by both models, for the reader. With ``latency`` (``{}`` for its defaults) both are timed too."""

    data: str = "builtin:test"
    column: str | None = None
    split: str | None = None
    samples: Annotated[int, Field(ge=1)] = 32
    sequence_length: Annotated[int, Field(ge=8)] = 512
    packing: Packing = "auto"
    batch_size: Annotated[int, Field(ge=1)] = 4
    generations: Annotated[int, Field(ge=0)] = 3
    latency: LatencyRecipe | None = None


class DistillDataRecipe(_Strict):
    """What the student learns from. ``evaluate`` chooses the best checkpoint, ``test`` is what is reported;
    without them a part of the training data is held out for both.

    ``columns`` maps a role of the task (text, label, prompt, …) to a column; ``header`` names the columns of a
    file without header line. ``length`` is in tokens, ``samples`` in examples. ``augment`` variants of each training
    example are made for the teacher to answer (classification); an epoch passes over them too.
    """

    train: str = "builtin:train"
    evaluate: str | None = None
    test: str | None = None
    train_split: str | None = None
    evaluate_split: str | None = None
    test_split: str | None = None
    header: tuple[str, ...] | None = None
    columns: dict[str, str] = {}
    samples: Annotated[int, Field(ge=1)] | None = None
    evaluate_samples: Annotated[int, Field(ge=1)] = 500
    test_samples: Annotated[int, Field(ge=1)] = 10_000
    length: Annotated[int, Field(ge=8)] = 256
    augment: Annotated[int, Field(ge=0)] = 0


class DistillRecipe(_Strict):
    """A student for ``model``, the teacher.

    ``student``: a path or hub id, ``derive:layers=N``, ``derive:params=P%``, or ``quantized:DIRECTORY``, a checkpoint
    that was quantized from ``model`` and is to recover. Unset ``temperature`` and
    ``alpha`` are 1 and 1 for language models, 3 and 0.7 for classifiers and question answering.
    ``batch_size`` examples make an optimizer step over all processes, ``micro_batch`` go through at a time.
    ``steps``, ``epochs`` or ``time_budget`` (minutes) end the training, whichever comes first.
    An unset ``learning_rate`` is 1e-4; of a quantized student it is in steps of the grid, 0.01 unless set.
    ``teacher_epochs`` trains the teacher on the labels first, for one that has no head for the task yet.
    """

    student: str | None = None
    student_revision: str | None = None
    task: str | None = None
    data: DistillDataRecipe = DistillDataRecipe()
    divergence: Literal["fkl", "rkl", "jsd", "skl", "srkl"] = "fkl"
    temperature: Annotated[float, Field(gt=0)] | None = None
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    hidden: Annotated[float, Field(ge=0)] = 0.0
    relations: Annotated[float, Field(ge=0)] = 0.0
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "nf4"] = "auto"
    teacher_device: str | None = None
    teacher_epochs: Annotated[int, Field(ge=0)] = 0
    cache: Path | None = None
    cache_targets: str = "topk:64"
    steps: Annotated[int, Field(ge=1)] | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    time_budget: Minutes | None = None
    batch_size: Annotated[int, Field(ge=1)] = 16
    micro_batch: Annotated[int, Field(ge=1)] = 8
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] = 1.0
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    dtype: Literal["float32", "bfloat16"] = "float32"
    dropout: bool = False
    lora: Annotated[int, Field(ge=1)] | None = None
    save_every: Annotated[int, Field(ge=1)] | None = None
    track: str = "auto"
    control: bool = False
    metrics: tuple[str, ...] = ()


class GateRecipe(_Strict):
    """What the report must show, or the command ends with exit code 3.

    ``max_ppl_increase`` is relative to the original's perplexity, ``min_accuracy_retention`` the student's metric ÷ the
    teacher's, ``min_speedup`` the checkpoint's speed ÷ the original's with ``evaluate.latency``, or else the student's
    throughput ÷ the teacher's, ``max_bytes`` the size of all weight files;
    ``beat_control`` asks for a student that is better than the control. Shares may be written as 2% and sizes as 120MB.
    A threshold inside the number's 95 % interval is neither met nor missed: ``on_inconclusive`` decides.
    """

    max_kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    max_ppl_increase: Share | None = None
    min_top1: Share | None = None
    min_cosine: Share | None = None
    min_accuracy_retention: Share | None = None
    min_speedup: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_bytes: Bytes | None = None
    beat_control: bool = False
    on_inconclusive: Literal["fail", "pass", "warn"] = "fail"


class Locked(_Strict):
    """What a lock adds to a recipe: the device, versions and digests of inputs of the run that wrote it."""

    device: str
    versions: dict[str, str]
    inputs: dict[str, str]


class Recipe(_Strict):
    """A pipeline: model → distill → scan → plan → quantize → verify → evaluate → report → gate, in ``output``.

    ``base_model`` is the hub id of ``model`` for the model card, where ``model`` is a copy of it on disk. With a
    ``signing_key``, an elliptic-curve private key in PEM form, the checkpoint gets a ``model.sig``.
    """

    model: str
    revision: str | None = None
    base_model: str | None = None
    signing_key: Path | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    output: Path | None = None
    seed: int = 0
    device: str = "auto"
    distill: DistillRecipe | None = None
    scan: ScanRecipe | None = None
    plan: PlanRecipe | None = None
    quantize: QuantizeRecipe = QuantizeRecipe()
    verify: VerifyRecipe = VerifyRecipe()
    evaluate: EvaluateRecipe | None = EvaluateRecipe()
    gate: GateRecipe = GateRecipe()
    locked: Locked | None = None


def build_recipe(file: Path | None, overrides: dict[str, Any]) -> Recipe:
    """The recipe in ``file`` (or an empty one) with ``overrides`` on top.

    ``overrides`` maps dotted keys to values; None stands for "not given". Raises UsageError naming
    file, line and key, or the command-line option at fault.
    """
    text = ""
    data: dict[str, Any] = {}
    if file is not None:
        text, data = _parse(file)
    given = {key: value for key, value in overrides.items() if value is not None}
    for key, value in given.items():
        node = data
        *parents, leaf = key.split(".")
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        if isinstance(value, list) and isinstance(node.get(leaf), list):
            value = [*node[leaf], *value]  # patterns on the command line add to the recipe's
        node[leaf] = value
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        keys = [str(key) for key in first["loc"]]
        message = {
            "extra_forbidden": "unknown key",
            "missing": "is needed",
        }.get(first["type"], first["msg"].removeprefix("Value error, "))
        dotted = ".".join(keys)
        if file is None or any(dotted == key or dotted.startswith(f"{key}.") for key in given):
            option = keys[-1].replace("_", "-") if not keys[-1].isdigit() else keys[-2]
            raise UsageError(f"{option}: {message}") from None
        raise UsageError(f"{file}, line {line_of(text, *keys)}: {dotted}: {message}") from None


def build_gate(file: Path | None, overrides: dict[str, Any]) -> GateRecipe:
    """The gate section of the recipe in ``file`` with ``overrides`` on top; raises UsageError as :func:`build_recipe`."""
    given = {f"gate.{key}": value for key, value in overrides.items()}
    return build_recipe(file, given if file is not None else {**given, "model": "unnamed"}).gate


def _parse(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = file.read_text("utf-8-sig")
        data = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(
            f"{file}{where}: not valid YAML ({getattr(error, 'problem', 'unreadable')})"
        ) from None
    if not isinstance(data, dict):
        raise UsageError(f"{file}: a recipe is a mapping of keys to values")
    return text, data
