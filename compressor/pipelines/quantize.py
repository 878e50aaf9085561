"""Quantize a model: open, check, plan, then block by block measure, round and write; verify; publish.

A weight's way: ``sources`` (read) → ``graph`` (which unit) → ``calibration`` (what reaches it) →
``rounding`` (codes, scales) → ``checkpoint`` (bytes, proof). Memory is one block plus the hidden states.
"""

import hashlib
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor import __version__
from compressor.calibration.block import calibrate_block
from compressor.calibration.kv_cache import KeyValueRange
from compressor.calibration.stream import Stream, advance, enter_block, open_stream, outputs
from compressor.checkpoint import kv_cache
from compressor.checkpoint.compressed_tensors import decode, encode, quantization_config, scale_dtype
from compressor.checkpoint.release import write_release
from compressor.checkpoint.signature import check_key, sign
from compressor.checkpoint.verify import Check, verify
from compressor.checkpoint.writer import CheckpointWriter, begun_with, refuse_source
from compressor.console import note, steps, warn
from compressor.errors import InputRefused, UsageError, VerificationFailed
from compressor.formats import QuantizedWeight, fake_quantize_kv
from compressor.graph import Linear, Unit, load, set_weight, unload
from compressor.graph.attention import attention_layers, intercepted, shared_from
from compressor.graph.experts import Experts
from compressor.pipelines.estimate import resolve_method
from compressor.pipelines.job import Job, estimated_disk_bytes, prepare, refuse_existing
from compressor.recipes import QuantizeRecipe, Recipe
from compressor.rounding.learned import LearnedWeight
from compressor.rounding.reconstruct import Reconstruction, ReconstructSettings, reconstruct_block
from compressor.rounding.unit import round_unit
from compressor.sources.tensors import check_finite, file_sha256

_PROBE_TOKENS = 32
_PROBE_POSITIONS = 8


@dataclass(frozen=True)
class Quantized:
    """The published checkpoint: where, how, what each layer's rounding cost, and the checks it passed.

    ``peak_memory`` is this process's peak resident memory in bytes until the checkpoint was written (the
    verification that follows loads whole models).
    """

    path: Path
    settings: QuantizeRecipe
    job: Job
    sidecar: dict[str, Any]
    records: list[dict[str, Any]]
    checks: list[Check]
    peak_memory: int
    seconds: float


def quantize(recipe: Recipe, target: Path | None, *, overwrite: bool = False) -> Quantized:
    """Run the whole job of ``recipe.quantize`` and publish the verified checkpoint at ``target``."""
    start = time.monotonic()
    if target is None:
        raise UsageError("output: is needed: name the directory to write with --output")
    refuse_existing(target, overwrite)
    if recipe.signing_key is not None:
        check_key(recipe.signing_key)
    job = prepare(recipe)
    refuse_source(target, job.source)
    job, recipe = resolve_method(job, recipe, begun=begun_with(target).get("settings"))
    for message in job.warnings:
        warn(message)
    with steps("checking source weights", len(job.source.weight_files)) as progress:
        check_finite(job.source.tensors.values())
        files = {}
        for file in job.source.weight_files:
            files[file.name] = file_sha256(file)
            progress.advance(file.name)

    fingerprint = _fingerprint(recipe, job, files)
    with CheckpointWriter(target, fingerprint, overwrite) as writer:
        writer.require_space(estimated_disk_bytes(job))
        records, probe, scales = _round_blocks(recipe, job, writer)
        sidecar = _sidecar(recipe, job, files, records, probe, scales)
        config = dict(job.source.config)
        config["quantization_config"] = quantization_config(
            job.plan, job.graph, _stored_as(job), kv_cache.SCHEME if scales else None
        )
        replaced = {f"{job.skeleton.stored_name(name)}.weight" for name in job.plan.quantized()}
        built = writer.finish(job.source, config, sidecar, replaced)
        write_release(built, base_model=recipe.base_model)
        peak = _peak_memory()
        note("verifying")
        checks = verify(
            built,
            source=job.source,
            engine=recipe.verify.engine,
            engine_python=recipe.verify.engine_python,
        )
        failed = [check for check in checks if not check.passed]
        if failed:
            rejected = writer.reject()
            raise VerificationFailed(
                f"{target}: not written: {failed[0].name}: {failed[0].detail} "
                f"({len(failed)} of {len(checks)} checks failed; the rejected files are in {rejected})"
            )
        if recipe.signing_key is not None:
            sign(built, recipe.signing_key)
        writer.publish()
    return Quantized(target, recipe.quantize, job, sidecar, records, checks, peak, time.monotonic() - start)


def _stored_as(job: Job) -> dict[str, str]:
    """Names of layers in the checkpoint, where transformers has other ones."""
    skeleton = job.skeleton
    names = [name for name in job.plan.layers if f"{name}.weight" in skeleton.stored]
    return {name: skeleton.stored_name(name) for name in names if skeleton.stored_name(name) != name}


def _round_blocks(
    recipe: Recipe, job: Job, writer: CheckpointWriter
) -> tuple[list[dict[str, Any]], dict[str, Any] | None, dict[str, tuple[float, float]]]:
    """Round every block, journalling each; returns the layer records, the probe, and the scales of a quantized cache."""
    skeleton, graph, device, dtype = job.skeleton, job.graph, job.device, job.compute_dtype
    stream: Stream | None = None
    if job.tokens is not None:
        stream = open_stream(
            skeleton,
            graph,
            job.tokens.input_ids,
            job.tokens.attention_mask,
            dtype=dtype,
            device=device,
            batch_bytes=int(recipe.quantize.calibration_memory * 2**30),
        )
    reference = _reference(recipe, job)
    probe_ids = _probe_ids(job)
    probe = open_stream(
        skeleton, graph, probe_ids, torch.ones_like(probe_ids), dtype=dtype, device=device, batch_bytes=2**30
    )

    records: list[dict[str, Any]] = []
    extras = _outside_units(job)
    cache = _Cache(job, stream) if recipe.quantize.kv_cache and stream is not None else None
    with steps("quantizing", len(graph.blocks) + bool(extras)) as progress:
        for index, path in enumerate(graph.blocks):
            for passing in (stream, reference, probe):
                if passing is not None:
                    enter_block(skeleton, graph, passing, index, dtype=dtype)
            block = load(skeleton, path, dtype=dtype, device=device)
            units = tuple(u for u in graph.units_of(index) if job.format_of(u.layers[0].name).quantized)
            formats = {layer.name: job.format_of(layer.name) for unit in units for layer in unit.layers}
            modules = {skeleton.module.get_submodule(name): fmt for name, fmt in formats.items()}
            done = writer.finished.get(index)
            originals = {name: skeleton.module.get_parameter(f"{name}.weight").detach() for name in formats}
            if reference is not None:
                advance(reference, block, index)  # what the original model has after this block
            if done is not None:
                tensors = writer.read_block(index)
                for name, fmt in formats.items():
                    _install(job, name, decode(skeleton.stored_name(name), tensors, fmt))
                if cache is not None:
                    cache.read(path, tensors)
                if stream is not None:
                    advance(stream, block, index, modules)
                records += done.records
            else:
                rounder = _Rounder(recipe.quantize, job)
                watch = cache.recorded if cache is not None else nullcontext
                if stream is not None and reference is not None:
                    inputs = stream.hidden.clone()
                    calibrate_block(stream, block, index, units, formats, rounder, watch())
                    if _reconstruct(recipe, job, rounder, originals, block, index, reference, inputs):
                        stream.hidden = inputs
                        with watch():
                            advance(stream, block, index, modules)
                    _list_unchosen(rounder, block, path)
                elif stream is not None and recipe.quantize.method != "rtn":
                    calibrate_block(stream, block, index, units, formats, rounder, watch())
                    _list_unchosen(rounder, block, path)
                else:
                    for unit in (part for whole in units for part in whole.by_input):
                        rounder(unit, None, 0)
                        for name, weight in rounder.weights.items():
                            _install(job, name, weight)
                    if stream is not None:
                        with watch():
                            advance(stream, block, index, modules)
                found = cache.write(path) if cache is not None else {}
                writer.write_block(index, rounder.tensors | found, rounder.records)
                records += rounder.records
            with cache.simulated(path) if cache is not None else nullcontext():
                advance(probe, block, index, modules)
            unload(block)
            progress.advance(path)
        if extras:
            records += _round_outside(recipe, job, writer, extras)
            progress.advance("outside the blocks")
    scales = {} if cache is None else cache.scales
    return records, _probe(job, probe, skip=bool(extras)), scales


class _Cache:
    """Scales of a quantized cache, block by block; ``scales`` are by the names of layers in the checkpoint."""

    def __init__(self, job: Job, stream: Stream) -> None:
        self._layers = attention_layers(job.skeleton.module)
        self._stored = {name: kv_cache.stored_path(job.skeleton, name) for name in self._layers}
        self._range = KeyValueRange(stream, self._layers)
        self.recorded = self._range.recorded
        self.scales: dict[str, tuple[float, float]] = {}

    def _of(self, block: str) -> list[str]:
        return [name for name in self._layers if name.startswith(f"{block}.")]

    def read(self, block: str, tensors: dict[str, Tensor]) -> None:
        """Take over what a finished block's file holds."""
        for name in map(self._stored.__getitem__, self._of(block)):
            of_keys, of_values = (float(tensors[f"{name}.{leaf}"]) for leaf in kv_cache.LEAVES)
            self.scales[name] = of_keys, of_values

    def write(self, block: str) -> dict[str, Tensor]:
        """The tensors of the block that was recorded last. Raises InputRefused for a layer that cached nothing."""
        found = self._range.scales()
        tensors: dict[str, Tensor] = {}
        for name in self._of(block):
            source = shared_from(self._layers, name)
            scales = found.get(name) if source is None else self.scales.get(self._stored[source])
            if scales is None:
                raise InputRefused(f"{name}: no keys and values entered its cache: leave --kv-cache out")
            self.scales[self._stored[name]] = scales
            tensors |= kv_cache.scale_tensors(self._stored[name], scales)
        return tensors

    def simulated(self, block: str) -> AbstractContextManager[None]:
        """Inside, the block attends to what the quantized cache would give back."""

        def through_cache(name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            of_keys, of_values = self.scales[self._stored[name]]
            return fake_quantize_kv(keys, of_keys), fake_quantize_kv(values, of_values)

        return intercepted({name: self._layers[name] for name in self._of(block)}, through_cache)


def _list_unchosen(rounder: "_Rounder", block: nn.Module, path: str) -> None:
    """Say of which experts the router chose none for any calibration token. (They were calibrated all the same: in
    calibration every expert sees every token.)"""
    for name, experts in block.named_modules():
        if isinstance(experts, Experts):
            for expert in torch.where(experts.chosen == 0)[0].tolist():
                rounder.annotate("the router chose it for no calibration token", f"{path}.{name}.{expert}.")


def _reference(recipe: Recipe, job: Job) -> Stream | None:
    """The original model's hidden states, in micro-batches, if the method holds blocks to them."""
    if recipe.quantize.method != "adaround" or job.tokens is None:
        return None
    return open_stream(
        job.skeleton,
        job.graph,
        job.tokens.input_ids,
        job.tokens.attention_mask,
        dtype=job.compute_dtype,
        device=job.device,
        batch_bytes=int(recipe.quantize.calibration_memory * 2**30),
        batch_sequences=recipe.quantize.adaround.batch,
    )


def _reconstruct(
    recipe: Recipe,
    job: Job,
    rounder: "_Rounder",
    originals: dict[str, Tensor],
    block: nn.Module,
    index: int,
    reference: Stream,
    inputs: Tensor,
) -> bool:
    """Learn the block's rounding from where ``rounder`` left it; whether anything changed."""
    start = time.monotonic()
    settings = recipe.quantize.adaround
    prefix = f"{job.graph.blocks[index]}."
    learned = {
        name.removeprefix(prefix): LearnedWeight(weight, originals[name], scale_dtype(job.skeleton.dtype))
        for name, weight in rounder.weights.items()
        if weight.format.kind == "int"
    }
    if not learned:
        return False
    found = reconstruct_block(
        block,
        index,
        reference,
        inputs,
        reference.hidden,
        learned,
        {name.removeprefix(prefix): weight.format for name, weight in rounder.weights.items()},
        ReconstructSettings(settings.iterations, settings.value_rate, settings.scale_rate),
        recipe.seed,
    )
    if found.after >= found.before:
        rounder.annotate(
            f"reconstruction gained nothing on {found.held_out} held-out batches: left as gptq rounded it"
        )
        return False
    for path, weight in found.weights.items():
        rounder.replace(prefix + path, weight, found, time.monotonic() - start)
        _install(job, prefix + path, weight)
    return True


class _Rounder:
    """Rounds one unit after another, keeping each layer's encoded tensors, weights and record."""

    def __init__(self, settings: QuantizeRecipe, job: Job) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.weights: dict[str, QuantizedWeight] = {}
        self.records: list[dict[str, Any]] = []
        self._settings, self._job = settings, job
        self._stored_in: dict[str, torch.dtype] = {}  # of each layer's scales

    def __call__(self, unit: Unit, hessian: Tensor | None, tokens: int) -> dict[str, Tensor]:
        start = time.monotonic()
        job, settings = self._job, self._settings
        results = round_unit(
            [job.skeleton.module.get_parameter(f"{layer.name}.weight") for layer in unit.layers],
            job.format_of(unit.layers[0].name),
            hessian,
            method="rtn" if settings.method == "rtn" else "gptq",
            scales=settings.scales,
            damping=settings.damping,
            scale_dtype=scale_dtype(job.skeleton.dtype),
        )
        computed = {}
        for layer, result in zip(unit.layers, results, strict=True):
            wide = layer.scale_bytes(job.skeleton.dtype) == 4
            self._stored_in[layer.name] = torch.float32 if wide else scale_dtype(job.skeleton.dtype)
            self._put(layer.name, result.weight)
            computed[layer.name] = result.weight.dequantize(job.skeleton.dtype).to(job.compute_dtype)
            record = {
                "module": layer.name,
                "format": result.weight.format.name,
                "method": result.method,
                "tokens": tokens,
                "damping": result.damping,
                "error_rtn": result.error_rtn,
                "error": result.error,
                "note": result.note,
                "seconds": round((time.monotonic() - start) / len(results), 3),
            }
            self.records.append({key: value for key, value in record.items() if value is not None})
        return computed

    def replace(self, name: str, weight: QuantizedWeight, found: Reconstruction, seconds: float) -> None:
        """Take over a layer's weight from the reconstruction of its block."""
        self._put(name, weight)
        for record in self.records:
            if record["module"] == name:
                record["method"] = "adaround"
                record["block_error_before"] = found.before
                record["block_error"] = found.after
                record["seconds"] = round(record["seconds"] + seconds / len(found.weights), 3)

    def _put(self, name: str, weight: QuantizedWeight) -> None:
        self.tensors |= encode(self._job.skeleton.stored_name(name), weight, self._stored_in[name])
        self.weights[name] = weight

    def annotate(self, remark: str, prefix: str = "") -> None:
        """Say something about every layer of the block whose name begins with ``prefix``."""
        for record in self.records:
            if record["module"].startswith(prefix):
                record["note"] = "; ".join(filter(None, [record.get("note"), remark]))


def _install(job: Job, name: str, weight: QuantizedWeight) -> None:
    """Put what the engine will compute with in place of the layer's weight."""
    value = weight.dequantize(job.skeleton.dtype).to(device=job.device, dtype=job.compute_dtype)
    set_weight(job.skeleton.module, f"{name}.weight", value)


def _outside_units(job: Job) -> list[Unit]:
    inside = {layer.name for layer in job.graph.layers}
    units = []
    for name in job.plan.quantized():
        if name not in inside:
            out_features, in_features = job.skeleton.module.get_parameter(f"{name}.weight").shape
            layer = Linear(name, out_features, in_features, f"{name}.bias" in job.skeleton.stored)
            units.append(Unit(name, "outside", len(job.graph.blocks), (layer,)))
    return units


def _round_outside(
    recipe: Recipe, job: Job, writer: CheckpointWriter, units: list[Unit]
) -> list[dict[str, Any]]:
    """Layers that were included by name: rounded to nearest, since the stream does not reach them."""
    index = len(job.graph.blocks)
    if index in writer.finished:
        return writer.finished[index].records
    rounder = _Rounder(recipe.quantize.model_copy(update={"method": "rtn"}), job)
    for unit in units:
        module = load(job.skeleton, unit.layers[0].name, dtype=job.compute_dtype, device=job.device)
        rounder(unit, None, 0)
        unload(module)
    writer.write_block(index, rounder.tensors, rounder.records)
    return rounder.records


def _probe_ids(job: Job) -> Tensor:
    """Token ids [1, 32] that need no tokenizer: any ids will do to compare two computations."""
    vocabulary = job.skeleton.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (1, _PROBE_TOKENS), generator=generator)


def _probe(job: Job, stream: Stream, skip: bool) -> dict[str, Any] | None:
    """What the fake-quantized model in memory answers: the largest logits at a few positions."""
    if skip:
        return None  # layers after the blocks were quantized, and the stream ends before them
    answer = outputs(job.skeleton, job.graph, stream, dtype=job.compute_dtype)[0].float().cpu()
    answer = torch.atleast_2d(answer)  # a classifier has one row for the whole sequence
    positions = torch.linspace(0, len(answer) - 1, min(len(answer), _PROBE_POSITIONS)).round().long()
    top = answer[positions].topk(min(8, answer.shape[-1]), dim=-1)
    return {
        "input_ids": stream.input_ids[0].tolist(),
        "positions": positions.tolist(),
        "top_ids": top.indices.tolist(),
        "top_logits": top.values.tolist(),
        "logsumexp": answer[positions].logsumexp(-1).tolist(),
        "dtype": str(job.compute_dtype).removeprefix("torch."),
    }


def _sidecar(
    recipe: Recipe,
    job: Job,
    files: dict[str, str],
    records: list[dict[str, Any]],
    probe: dict[str, Any] | None,
    scales: dict[str, tuple[float, float]],
) -> dict[str, Any]:
    """``compression.json``: all that made this checkpoint, and nothing that differs between two equal runs."""
    settings = recipe.quantize.model_dump(mode="json")
    if recipe.quantize.plan is not None:
        settings["plan"] = (
            recipe.quantize.plan.name
        )  # where it lay is no part of the result; its content is below
    return {
        "schema_version": 1,
        "tool": {"name": "compressor", "version": __version__},
        "source": {
            "ref": job.source.ref,
            "kind": job.source.kind,
            "revision": job.source.revision,
            "files": files,
        },
        "plan": job.plan.model_dump(mode="json", exclude_none=True),
        "settings": {"seed": recipe.seed, **settings},
        "calibration": data_report(job),
        "layers": [{k: v for k, v in record.items() if k != "seconds"} for record in records],
        "probe": probe,
        "coverage": job.coverage.model_dump(),
        "stored_as": {name: other for name, other in _stored_as(job).items() if name in job.plan.quantized()},
        **({"kv_cache": scales} if scales else {}),
    }


def data_report(job: Job) -> dict[str, Any] | None:
    """How the calibration data was used, as the report's data section; None without calibration."""
    return None if job.tokens is None else asdict(job.tokens.report)


def _fingerprint(recipe: Recipe, job: Job, files: dict[str, str]) -> dict[str, Any]:
    """What must be equal for a journal to be continued: every input of every block's result."""
    settings = recipe.quantize.model_dump(mode="json", exclude={"plan", "min_coverage", "engine"})
    ids = job.tokens.input_ids if job.tokens is not None else torch.empty(0)
    return {
        "compressor": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": job.device.type,
        "source": files,
        "config": job.source.config,
        "plan": job.plan.model_dump(mode="json", exclude={"model"}),
        "settings": settings,
        "tokens": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
    }


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
