"""``diagnosis.json``: what was found, for scripts. Unknown keys are errors; ``version`` grows when a key changes meaning."""

from typing import Literal

from pydantic import FiniteFloat

from compressor.reports.schema import Estimate, Section


class Place(Section):
    """A unit, a norm, or a quantized layer outside the blocks, in the order of computation.

    Ratios are of the layer's own output, in dB, signal over error: ``snr_db`` of the whole error, then of what rounded
    weights, quantized inputs and errors made before cause alone. Null where there is no such error (or, of the whole and
    the inherited one, where the models route other tokens to the layer). ``cosine`` is the mean over tokens; ``max_error``
    is in the output's unit. ``predicted_kl`` is what the unit's error alone costs, in nats per token. ``jump``: its own
    error stands out.
    """

    name: str
    kind: str
    block: int
    layers: list[str]
    format: str
    snr_db: FiniteFloat | None = None
    cosine: FiniteFloat | None = None
    max_error: FiniteFloat
    weights_snr_db: FiniteFloat | None = None
    activations_snr_db: FiniteFloat | None = None
    inherited_snr_db: FiniteFloat | None = None
    predicted_kl: FiniteFloat | None = None
    predicted_kl_stderr: FiniteFloat | None = None
    jump: bool


class Fix(Section):
    """One change of one unit. ``predicted_gain`` is in nats of KL per token; ``gain_per_mb`` what ranks it: gain per
    10⁶ extra bytes, at least 1 % of an average unit's. Of those that were tried, ``measured_gain`` is on top of those that
    were ``kept`` before."""

    unit: str
    fix: Literal["adaround", "finer", "w8", "bf16"]
    format: str
    predicted_gain: FiniteFloat
    extra_bytes: int
    gain_per_mb: FiniteFloat
    measured_gain: Estimate | None = None
    kept: bool | None = None


class Edited(Section):
    """The plan with every kept fix: KL on held-out text before and after, and the bytes it adds."""

    units: list[str]
    method: Literal["gptq", "adaround"]
    extra_bytes: int
    kl_before: Estimate
    kl_after: Estimate


class Diagnosis(Section):
    """``kl`` is measured on all sequences, gains on the ``held_out`` ones, which no fix was rounded on. ``units``: those
    that stand out come first, then by what their error is predicted to cost alone (without an output head: by the error
    itself). ``block_snr_db`` is that of the hidden state after each block."""

    version: Literal[1] = 1
    artifact: Literal["diagnosis"] = "diagnosis"
    original: str
    compressed: str
    data: str
    data_sha256: str
    sequences: int
    sequence_length: int
    tokens: int
    held_out: int
    seed: int
    device: str
    dtype: str
    kl: Estimate | None
    first_jump: str | None
    units: list[str]
    places: list[Place]
    block_snr_db: list[FiniteFloat | None]
    fixes: list[Fix]
    edited: Edited | None
    warnings: list[str]
    versions: dict[str, str]


def diagnosis_json(found: Diagnosis) -> str:
    return found.model_dump_json(indent=1) + "\n"
