"""``compression.json``: what made a checkpoint, beside it.

compressed-tensors forbids keys of its own in ``config.json``, so all of compressor's go here. Nothing in
it depends on the time or the machine's name: two equal runs write the same bytes.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from compressor.errors import InputRefused
from compressor.plans import Plan

SIDECAR = "compression.json"


class Tool(BaseModel):
    name: str
    version: str


class SourceFacts(BaseModel):
    """The original; ``files`` maps its weight files to their SHA-256."""

    ref: str
    kind: str
    revision: str | None = None
    files: dict[str, str]


class Probe(BaseModel):
    """What the fake-quantized model in memory answered: its largest outputs at a few ``positions``.

    ``dtype`` is the one it computed in. For models without a head the outputs are the last hidden state's.
    """

    input_ids: list[int]
    positions: list[int]
    top_ids: list[list[int]]
    top_logits: list[list[float]]
    logsumexp: list[float]
    dtype: str = "float32"


class CoverageFacts(BaseModel):
    """Quantized over eligible parameters; ``uncovered`` maps an eligible tensor to why it stayed."""

    quantized_parameters: int
    eligible_parameters: int
    ratio: float
    uncovered: dict[str, str]


class Sidecar(BaseModel):
    """``files`` maps the weight files of the checkpoint to their SHA-256; the writer fills it in. ``kv_cache`` maps
    attention layers to the scales of their keys and values.

    Layers are called as transformers has them in memory. ``stored_as`` maps those quantized ones that are stored under
    another name to that, as the source had them."""

    schema_version: Literal[1]
    tool: Tool
    source: SourceFacts
    plan: Plan
    settings: dict[str, Any]
    calibration: dict[str, Any] | None = None
    layers: list[dict[str, Any]]
    probe: Probe | None = None
    coverage: CoverageFacts
    kv_cache: dict[str, tuple[float, float]] | None = None
    files: dict[str, str] = {}
    stored_as: dict[str, str] = {}


def read_sidecar(directory: Path) -> Sidecar | None:
    """The sidecar of a checkpoint, None if it has none. Raises InputRefused when it is not valid."""
    file = directory / SIDECAR
    try:
        return Sidecar.model_validate(json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InputRefused(f"{file}: not a valid sidecar ({reason})") from None
