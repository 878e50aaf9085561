"""What commands print with ``--json``, and the published schemas of it.

A command prints one of these, or the document that it also writes: a report, a scan, a diagnosis. ``python -m
compressor.cli.documents`` writes the schema of each into ``compressor/schemas/``.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from compressor.console import out
from compressor.diagnosis.schema import Diagnosis
from compressor.pipelines.estimate import Estimate
from compressor.planning.calibrate import Calibration
from compressor.plans import Plan
from compressor.reports.schema import Check, Data, Gate, Report, Section
from compressor.sensitivity.estimate import ScanEstimate
from compressor.sensitivity.schema import Sensitivity


class InspectedUnit(Section):
    """Layers that share one format; ``layers`` maps their names to [out_features, in_features]."""

    name: str
    kind: str
    layers: dict[str, tuple[int, int]]


class InspectedCoverage(Section):
    """What ``quantize`` would cover; ``skipped`` maps parameters that it would not to the reason."""

    ratio: float
    eligible_parameters: int
    skipped: dict[str, str]


class Inspected(Section):
    """A model that is not quantized. ``kept`` are layers that stay as they are with the reason, ``ties`` parameters that
    are others' too, ``loadable_everywhere_in`` the formats that an engine can load every layer in."""

    architecture: str
    parameters: int
    bytes: int
    dtype: str
    blocks: list[str]
    units: list[InspectedUnit]
    kept: dict[str, str]
    unsupported: list[str]
    coverage: InspectedCoverage
    ties: dict[str, str]
    unused_tensors: list[str]
    loadable_everywhere_in: dict[str, list[str]]


class InspectedQuantized(Section):
    """A quantized checkpoint, as its config describes it."""

    quantized: Literal[True] = True
    tensors: int
    quantization_config: dict[str, Any]


class Verified(Section):
    """The checks of a checkpoint; ``passed`` when each of them did."""

    checkpoint: str
    source: str | None
    passed: bool
    checks: list[Check]


class Gated(Gate):
    """All thresholds, and the report that was held to them."""

    report: str


class Planned(Section):
    """The plan that was made; ``path`` is null in a dry run. ``damage`` is in the unit of the scan, ``bits`` a weight in the
    units, ``bytes`` of the checkpoint, ``formats`` by unit."""

    path: str | None
    budget: str
    bytes: int
    bits: float
    damage: float
    predicted_kl: float | None
    calibration: Calibration | None
    formats: dict[str, str]


class QuantizedCheckpoint(Section):
    """The checkpoint that was written and verified."""

    path: str
    seconds: float
    peak_memory_bytes: int
    coverage: float
    checks: list[Check]
    warnings: list[str]


class OtherCheckpoint(Section):
    """The checkpoint that ``--format bitsandbytes`` or ``onnx`` wrote and verified."""

    path: str
    checks: list[Check]


class Scanned(Sensitivity):
    """The scan at ``path`` without its ``factor``."""

    path: str
    factor: tuple[tuple[float, ...], ...] = Field(default=(), exclude=True)


class CacheFilled(Section):
    """The teacher's targets that ``distill --cache-only`` stored."""

    cache: str
    bytes: int


class DryRun(Section):
    """Everything that can be checked beforehand is in order."""

    dry_run: Literal[True] = True


class RunChecked(DryRun):
    command: Literal["run"] = "run"
    steps: list[str]


class DistillChecked(DryRun):
    """``steps`` is null when a time budget ends the training."""

    command: Literal["distill"] = "distill"
    teacher: str
    task: str
    training_examples: int
    evaluation_examples: int
    test_examples: int
    steps: int | None
    batch_size: int
    divergence: str
    temperature: float
    alpha: float
    device: str


class ScanChecked(DryRun):
    command: Literal["scan-sensitivity"] = "scan-sensitivity"
    estimate: ScanEstimate
    formats: dict[str, list[str]]
    warnings: list[str]


class QuantizeChecked(DryRun):
    command: Literal["quantize"] = "quantize"
    plan: Plan
    estimate: Estimate


class OtherChecked(DryRun):
    command: Literal["quantize"] = "quantize"
    format: Literal["bitsandbytes", "onnx"]


class EvaluateChecked(DryRun):
    command: Literal["evaluate"] = "evaluate"
    task: str
    device: str
    dtype: str
    data: Data
    memory_needed_bytes: int
    memory_available_bytes: int
    warnings: list[str]


class DiagnoseChecked(DryRun):
    command: Literal["diagnose"] = "diagnose"
    layers: int
    units: int
    blocks: int
    sequences: int
    sequence_length: int


# By the name of the schema. A command whose name is none prints a report, a scan or a diagnosis.
DOCUMENTS: dict[str, Any] = {
    "report": Report,
    "sensitivity": Sensitivity,
    "scan-sensitivity": Scanned,
    "diagnosis": Diagnosis,
    "inspect": Inspected | InspectedQuantized,
    "verify": Verified,
    "gate": Gated,
    "plan": Planned,
    "quantize": QuantizedCheckpoint | OtherCheckpoint,
    "distill-cache": CacheFilled,
    "dry-run": RunChecked
    | DistillChecked
    | ScanChecked
    | QuantizeChecked
    | OtherChecked
    | EvaluateChecked
    | DiagnoseChecked,
}
SCHEMAS = Path(__file__).parent.parent / "schemas"


def print_document(document: BaseModel) -> None:
    out.file.write(json.dumps(document.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")


def schema_json(name: str) -> str:
    """The JSON schema (draft 2020-12) of a document, as it is published."""
    schema = TypeAdapter(DOCUMENTS[name]).json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        (SCHEMAS / f"{name}.schema.json").write_text(schema_json(name), "utf-8")
