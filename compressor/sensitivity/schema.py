"""``sensitivity.json``: what a scan found. Everything that ``compressor plan`` needs is in it."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from compressor.errors import UsageError

ScoreKind = Literal["fisher", "measured", "output-mse"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Layer(_Strict):
    """A linear layer with weight [out_features, in_features]."""

    name: str
    out_features: Annotated[int, Field(ge=1)]
    in_features: Annotated[int, Field(ge=1)]


class FormatScore(_Strict):
    """One unit in one format, everything else untouched.

    ``damage`` is the increase of KL(original ‖ compressed) in nats per token, estimated (``fisher``) or
    measured (``measured``); under ``output-mse`` it is the relative squared error of the unit's
    output, which has no such unit. ``stderr`` is the standard error of ``damage`` over sequences.
    ``weight_error`` is |ΔW|²/|W|², ``output_error`` the mean of |Δy|²/|y|² over sequences and the unit's layers (not
    measured by ``measured``). ``bytes`` is what the unit takes in the checkpoint.
    """

    damage: NonNegative
    stderr: NonNegative | None = None
    weight_error: NonNegative
    output_error: NonNegative | None
    bytes: Annotated[int, Field(ge=0)]


class UnitScores(_Strict):
    """A decision: layers that an engine fuses, so they share one format. ``formats`` maps names to scores."""

    name: str
    kind: str
    block: int
    layers: tuple[Layer, ...]
    formats: dict[str, FormatScore]


class Kept(_Strict):
    """A layer that no format is considered for."""

    reason: str
    bytes: Annotated[int, Field(ge=0)]


class Sensitivity(_Strict):
    """A whole scan.

    ``factor`` [rank, columns] carries the interactions: choosing the columns c and d (unit × format, as in
    ``columns``) together changes KL by about 2·Σ_r factor[r][c]·factor[r][d] nats per token beyond their
    damages. It is empty for scores that know no interactions. ``other_bytes`` is everything in the checkpoint
    that is neither a unit nor ``kept`` (norms, biases, …), ties counted once.
    """

    version: Literal[1] = 1
    artifact: Literal["sensitivity"] = "sensitivity"
    model: str
    weights_sha256: str
    score: ScoreKind
    rounding: Literal["rtn", "gptq"]
    engine: str | None
    seed: int
    draws: int
    sequences_used: int
    sequence_length: int
    tokens: int
    data: str
    column: str | None = None
    split: str | None = None
    data_sha256: str
    device: str
    dtype: str
    parameters: int
    source_bytes: int
    other_bytes: int
    formats: tuple[str, ...]
    units: tuple[UnitScores, ...]
    kept: dict[str, Kept]
    columns: tuple[tuple[str, str], ...] = ()
    factor: tuple[tuple[Finite, ...], ...] = ()
    versions: dict[str, str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "Sensitivity":
        if any(len(row) != len(self.columns) for row in self.factor):
            raise ValueError(f"every row of factor must have {len(self.columns)} values, one per column")
        known = {(unit.name, name) for unit in self.units for name in unit.formats}
        unknown = [column for column in self.columns if column not in known]
        if unknown:
            raise ValueError(f"column {unknown[0]} names no unit and format of the scan")
        return self


def sensitivity_json(scan: Sensitivity) -> str:
    """The document; rows of ``factor`` are a line each, so that the rest stays readable."""
    data = scan.model_dump(mode="json", exclude={"factor"})
    text = json.dumps(data, indent=1, ensure_ascii=False)
    rows = ",\n  ".join("[" + ", ".join(f"{value:.5g}" for value in row) + "]" for row in scan.factor)
    return text.removesuffix("\n}") + ',\n "factor": [' + (f"\n  {rows}\n " if rows else "") + "]\n}\n"


def write_sensitivity(file: Path, scan: Sensitivity) -> None:
    """Write atomically, replacing what is there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.new")
    unfinished.write_text(sensitivity_json(scan), "utf-8")
    unfinished.replace(file)


def read_sensitivity(file: Path) -> Sensitivity:
    """Parse a scan. Raises UsageError naming file and key."""
    try:
        data: Any = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{file}: not valid JSON ({error}): run scan-sensitivity again") from None
    if not isinstance(data, dict) or data.get("artifact") != "sensitivity":
        raise UsageError(f"{file}: not a sensitivity scan: give the file that scan-sensitivity wrote")
    if data.get("version") != 1:
        raise UsageError(
            f"{file}: version {data.get('version')} of the format, and this compressor reads 1: scan again"
        )
    try:
        return Sensitivity.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"{file}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
