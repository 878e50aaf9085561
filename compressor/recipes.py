"""Recipes: a whole run in one YAML file, validated before anything starts.

Unknown keys and wrong types are refused, naming file, line and key. Values given on the command line
win over the recipe's, and the recipe's over the defaults below.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from compressor.errors import UsageError
from compressor.formats import parse_format
from compressor.plans import line_of

Packing = Literal["auto", "concat", "rows"]
Method = Literal["rtn", "gptq"]


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


class QuantizeRecipe(_Strict):
    """How to quantize: one ``scheme`` for every layer, or a ``plan`` file.

    ``scales`` chooses between searched (mse) and absmax scales for rtn; ``damping`` is GPTQ's, relative
    to the Hessian's mean diagonal; ``min_coverage`` is the share of eligible parameters that must end up
    quantized, below which the run fails.
    """

    scheme: str = "w4g128"
    plan: Path | None = None
    method: Method = "gptq"
    scales: Literal["mse", "absmax"] = "mse"
    damping: Annotated[float, Field(gt=0, le=1)] = 0.01
    ignore: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    strict: bool = False
    min_coverage: Annotated[float, Field(ge=0, le=1)] = 0.0
    engine: str | None = None
    calibration: DataRecipe = DataRecipe()
    calibration_memory: Annotated[float, Field(gt=0)] = 1.5  # GiB of activations at once

    @field_validator("scheme")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            return parse_format(value).name
        except UsageError as error:
            raise ValueError(str(error)) from None


class VerifyRecipe(_Strict):
    """Which engine to start on the finished checkpoint, besides the checks that always run."""

    engine: Literal["transformers", "vllm"] | None = "transformers"
    engine_python: Path | None = None


class EvaluateRecipe(_Strict):
    """Text for perplexity, KL and agreement; lengths are in tokens."""

    data: str = "builtin:test"
    column: str | None = None
    split: str | None = None
    samples: Annotated[int, Field(ge=1)] = 32
    sequence_length: Annotated[int, Field(ge=8)] = 512
    packing: Packing = "auto"
    batch_size: Annotated[int, Field(ge=1)] = 4


class Recipe(_Strict):
    """A pipeline: model → quantize → verify → evaluate → report, in ``output``."""

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    output: Path | None = None
    seed: int = 0
    device: str = "auto"
    quantize: QuantizeRecipe = QuantizeRecipe()
    verify: VerifyRecipe = VerifyRecipe()
    evaluate: EvaluateRecipe | None = EvaluateRecipe()


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
