"""The whole diagnosis: compare, rank, try, and say what to change."""

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from compressor import __version__
from compressor.console import warn
from compressor.diagnosis import schema
from compressor.diagnosis.attempt import Tried, attempt, held_out, per_token
from compressor.diagnosis.compare import Compared, Place, compare
from compressor.diagnosis.job import DiagnoseJob, with_ends
from compressor.diagnosis.predict import Fix, Predicted, predict
from compressor.diagnosis.show import edited_plan_yaml, plot
from compressor.errors import InputRefused, UsageError
from compressor.evaluation.facts import installed
from compressor.graph.assign import layer_bytes
from compressor.planning.write import write_plan
from compressor.plans import Assignment, Plan
from compressor.reports.write import write_atomically
from compressor.sensitivity.journal import Journal, begun
from compressor.sources.tensors import file_sha256

# An error stands out when it is this far above the median of its peers: both in dB, and in robust deviations.
_JUMP_DB, _JUMP_DEVIATIONS = 6.0, 5.0
_WRITING = "writing"  # the step after which files in the output are this run's own


@dataclass(frozen=True)
class Diagnosed:
    """``plan`` is the checkpoint's, edited; None when no fix was kept."""

    diagnosis: schema.Diagnosis
    plan: Plan | None


def diagnose(job: DiagnoseJob, output: Path | None = None) -> Diagnosed:
    """Run everything, and write it into the directory ``output`` if there is one.

    Working files (hidden states, gradients, the journal) lie beside ``output``, where a killed run goes on from them, or
    else in a temporary directory.
    """
    warnings = list(job.scan.tokens.report.warnings)
    if not job.graph.head:
        warnings.append(
            "the model has no output head: units are ranked by their own error, and no fix is tried"
        )
    if len(job.scan.tokens.input_ids) < 2:
        warnings.append("one sequence: fixes are measured on the text they were rounded on")
    outside = [name for name in job.formats if name not in {layer.name for layer in job.graph.layers}]
    if outside:
        warnings.append(
            f"{outside[0]}: is quantized outside the blocks, which a plan cannot say: an edited plan leaves it as in the original"
        )
    with (
        tempfile.TemporaryDirectory(prefix="compressor-") as scratch,
        Journal(output or Path(scratch) / "diagnosis", _fingerprint(job)) as journal,
    ):
        job = with_ends(job, journal.directory)
        compared = compare(job, journal)
        predicted = Predicted({}, {}, [])
        if job.graph.head:
            try:
                predicted = predict(job, compared, journal)
            except InputRefused as reason:  # a model that no backward scan follows can still be compared
                warnings.append(f"{reason}: units are ranked by their own error, and no fix is tried")
        jumps = _jumps(compared.places)
        chosen = _best_of_each_unit(predicted.fixes, jumps)[: job.settings.tries]
        tried = attempt(job, compared, journal, chosen) if chosen else None
        found = _collect(job, compared, predicted, tried, warnings)
        if output is not None:
            journal.finish(_WRITING)
            _write(found, output)
        journal.remove()
    for message in warnings:
        warn(message)
    return found


def check_directory(output: Path, overwrite: bool) -> None:
    """Raise UsageError when a diagnosis in ``output`` would be replaced without ``overwrite``; call before work.

    A run that was killed while it wrote its files may replace them.
    """
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: is a file: give a directory for the diagnosis")
    for name in ("diagnosis.json", "diagnosis.svg", "plan.yaml"):
        if (output / name).exists() and not overwrite and _WRITING not in begun(output):
            raise UsageError(f"{output / name}: already exists: choose another output or pass --overwrite")


def _write(found: Diagnosed, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    plot(found.diagnosis, directory / "diagnosis.svg")
    plan = directory / "plan.yaml"
    if found.plan is None:
        plan.unlink(missing_ok=True)  # an older one would be mistaken for this one's
    else:
        write_plan(plan, edited_plan_yaml(found.plan, found.diagnosis, plan.name), overwrite=True)
    write_atomically(directory / "diagnosis.json", schema.diagnosis_json(found.diagnosis))


def _fingerprint(job: DiagnoseJob) -> dict[str, Any]:
    """What must be equal for a journal to be continued: every input of every step's result."""
    weights = (*job.scan.source.weight_files, *sorted(job.artifact.path.glob("*.safetensors")))
    return {
        "compressor": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": job.scan.device.type,
        "settings": asdict(job.settings),
        "weights": [file_sha256(file) for file in weights],
        "configs": [job.scan.source.config, job.artifact.config],
        "data": job.scan.tokens.report.sha256,
    }


def _best_of_each_unit(fixes: Sequence[Fix], jumps: set[str]) -> list[Fix]:
    """The best fix of every unit, those of units that stand out first."""
    best: dict[str, Fix] = {}
    for fix in fixes:  # best first
        best.setdefault(fix.unit.name, fix)
    return sorted(best.values(), key=lambda fix: fix.unit.name not in jumps)


def _collect(
    job: DiagnoseJob,
    compared: Compared,
    predicted: Predicted,
    tried: Tried | None,
    warnings: list[str],
) -> Diagnosed:
    jumps = _jumps(compared.places)
    by_error = {p.name: p.own for p in compared.places if p.format.quantized}
    damage = predicted.damage or by_error
    measured = {id(one.fix): one for one in tried.attempts} if tried else {}
    kept = [one.fix for one in tried.attempts if one.kept] if tried else []
    scan, part = job.scan, held_out(compared.streams[0])
    kl = None
    if compared.kl is not None:
        kl = schema.Estimate.of(per_token(compared.kl, None, compared.counts, job.settings.seed))
    found = schema.Diagnosis(
        original=job.settings.original,
        compressed=job.settings.compressed,
        data=job.settings.data,
        data_sha256=scan.tokens.report.sha256,
        sequences=len(scan.tokens.input_ids),
        sequence_length=scan.tokens.input_ids.shape[1],
        tokens=sum(compared.counts),
        held_out=part.stop - part.start,
        seed=job.settings.seed,
        device=scan.device.type,
        dtype=str(scan.dtype).removeprefix("torch."),
        kl=kl,
        first_jump=next((p.name for p in compared.places if p.name in jumps), None),
        units=sorted(damage, key=lambda name: (name not in jumps, -damage[name])),
        places=[_place(p, predicted, p.name in jumps) for p in compared.places],
        block_snr_db=[_db(share) for share in compared.blocks],
        fixes=[
            schema.Fix.model_validate(
                {
                    "unit": fix.unit.name,
                    "fix": fix.kind,
                    "format": fix.format.name,
                    "predicted_gain": fix.gain,
                    "extra_bytes": fix.extra_bytes,
                    "gain_per_mb": 1e6 * fix.worth,
                    "measured_gain": schema.Estimate.of(measured[id(fix)].gain)
                    if id(fix) in measured
                    else None,
                    "kept": measured[id(fix)].kept if id(fix) in measured else None,
                }
            )
            for fix in predicted.fixes
        ],
        edited=_edited(job, tried, kept) if tried and kept else None,
        warnings=warnings,
        versions={
            "compressor": __version__,
            **installed(("torch", "transformers")),
        },
    )
    return Diagnosed(found, edited_plan(job, kept) if kept else None)


def _edited(job: DiagnoseJob, tried: Tried, kept: Sequence[Fix]) -> schema.Edited:
    return schema.Edited(
        units=[fix.unit.name for fix in kept],
        method="adaround" if any(fix.kind == "adaround" for fix in kept) else "gptq",
        extra_bytes=sum(fix.extra_bytes for fix in kept),
        kl_before=schema.Estimate.of(per_token(tried.before, None, tried.counts, job.settings.seed)),
        kl_after=schema.Estimate.of(per_token(tried.after, None, tried.counts, job.settings.seed)),
    )


def edited_plan(job: DiagnoseJob, fixes: Sequence[Fix]) -> Plan:
    """The checkpoint's plan, read from its tensors, with ``fixes`` carried out and named as the reason."""
    changed = {layer.name: fix for fix in fixes for layer in fix.unit.layers}
    layers: dict[str, Assignment] = {}
    for unit in job.graph.units:
        for layer in unit.layers:
            fix = changed.get(layer.name)
            fmt = fix.format if fix else job.format_of(unit)
            layers[layer.name] = Assignment(
                format=fmt.name,
                bytes=layer_bytes(job.original, layer, fmt),
                reason=f"diagnose: {_words(fix, job.format_of(unit).name)}" if fix else None,
            )
    for name, why in job.graph.kept.items():
        entry = job.original.stored.get(f"{name}.weight")
        layers[name] = Assignment(format="bf16", bytes=entry.nbytes if entry else 0, reason=why)
    return Plan(model=job.settings.original, layers=layers)


def _words(fix: Fix, before: str) -> str:
    return (
        f"round again with adaround ({before})" if fix.kind == "adaround" else f"{fix.format}, was {before}"
    )


def _jumps(places: Sequence[Place]) -> set[str]:
    """Places whose own error stands out from what quantized units of this checkpoint usually have."""
    usual = [10 * math.log10(p.own) for p in places if p.format.quantized and p.own > 0]
    if len(usual) < 3:
        return set()
    median = statistics.median(usual)
    deviation = 1.4826 * statistics.median(abs(value - median) for value in usual)
    limit = median + max(_JUMP_DB, _JUMP_DEVIATIONS * deviation)
    return {p.name for p in places if p.own > 0 and 10 * math.log10(p.own) > limit}


def _place(place: Place, predicted: Predicted, jump: bool) -> schema.Place:
    def db(squares: float | None) -> float | None:
        return None if squares is None else _db(squares / max(place.energy, 1e-300))

    return schema.Place(
        name=place.name,
        kind=place.kind,
        block=place.block,
        layers=list(place.layers),
        format=place.format.name,
        snr_db=db(place.error),
        cosine=place.cosines / place.tokens if place.tokens else None,
        max_error=place.max_error,
        weights_snr_db=db(place.weights),
        activations_snr_db=db(place.activations),
        inherited_snr_db=db(place.inherited),
        predicted_kl=predicted.damage.get(place.name),
        predicted_kl_stderr=predicted.stderr.get(place.name),
        jump=jump,
    )


def _db(share: float) -> float | None:
    """Signal over error in dB from an error's share of the signal's energy; None for no error."""
    return round(-10 * math.log10(share), 3) if share > 0 else None
