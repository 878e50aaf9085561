"""Another output of ``quantize``: an encoder or a classifier as ONNX with INT8 weights, for ONNX Runtime.

torch exports it in FP32 with batch and length left open, and ONNX Runtime quantizes the weights, by channel; activations are
quantized as they come. So plans, calibration and formats of compressor's do not apply. The proof is that ONNX Runtime
answers as torch does, before and after the weights were quantized.
"""

import inspect
import logging
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from compressor.checkpoint.verify import Check
from compressor.checkpoint.writer import CheckpointWriter
from compressor.console import note
from compressor.errors import InputRefused, UsageError
from compressor.evaluation.load import quiet
from compressor.graph import build_skeleton, load
from compressor.pipelines.other_format import carry_files, open_for, publish_checked
from compressor.recipes import Recipe
from compressor.sources.model import Source

_FILE = "model.onnx"
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_EXPRESSED = {"format", "scheme"}
_MOST_PARAMETERS = 1_500_000_000  # a file of ONNX ends at 2 GB, and some of the weights stay FP32
# Error over the deviation of an output: FP32's largest, INT8's root mean square. all-MiniLM-L6-v2 has 0.18 on these probes
# (0.38 with one scale a tensor), its single tokens up to 0.6, and its embeddings of sentences a cosine of 0.99.
_FARTHEST = {"FP32": 1e-3, "INT8": 0.25}
# Encoders by their language-model class that read more than text, or read it as a table.
_NOT_TEXT = {"layoutlm", "luke", "modernvbert", "neomme", "perceiver", "tapas", "ultravbert"}


@dataclass(frozen=True)
class _Probe:
    """``inputs`` by name, each int64 [batch, length], and what torch answers; ``mask`` is bool [batch, length]."""

    inputs: dict[str, Tensor]
    mask: Tensor
    outputs: dict[str, Tensor]


def write_onnx(recipe: Recipe, target: Path | None, *, overwrite: bool, dry_run: bool) -> list[Check]:
    """Export ``recipe.model`` to ``target``/model.onnx with INT8 weights and prove it by running it; the checks it passed.

    Raises UsageError for settings that the format cannot express, MachineLimit without the packages, InputRefused for models
    that are neither encoders nor classifiers of text, VerificationFailed when ONNX Runtime answers otherwise.
    """
    if torch.device("cpu" if recipe.device == "auto" else recipe.device).type != "cpu":
        raise UsageError(f"--device {recipe.device}: --format onnx is made and run on the CPU: leave it out")
    source = open_for(
        recipe,
        target,
        expressed=_EXPRESSED,
        packages=_PACKAGES,
        extra="onnx",
        overwrite=overwrite,
        dry_run=dry_run,
    )
    _require_encoder(source)
    skeleton = build_skeleton(source)
    parameters = sum(parameter.numel() for parameter in skeleton.module.parameters())
    if parameters > _MOST_PARAMETERS:
        raise InputRefused(
            f"{source.path}: has {parameters:,} parameters, and --format onnx writes at most {_MOST_PARAMETERS:,}"
        )
    if dry_run:
        note(f"{parameters:,} parameters as int8")
        return []
    assert target is not None

    start = time.monotonic()
    with CheckpointWriter(target, {"format": "onnx", "scheme": "int8"}, overwrite) as writer:
        load(skeleton, "", dtype=torch.float32)
        model = skeleton.module
        probes = _probes(model)
        built = writer.build()
        with TemporaryDirectory(dir=writer.partial) as directory:
            exported = Path(directory) / "fp32.onnx"
            note("exporting")
            _export(model, probes[0], exported, source)
            note("quantizing")
            _quantize(exported, built / _FILE, source)
            note("verifying")
            checks = [
                _same_outputs(exported, "FP32", probes),
                _valid(built / _FILE),
                _quantized(built / _FILE),
                _same_outputs(built / _FILE, "INT8", probes),
            ]
        shutil.copyfile(source.path / "config.json", built / "config.json")
        carry_files(source, built)
        size = (built / _FILE).stat().st_size
        publish_checked(writer, checks)
    note(f"{target}: {_FILE}, {size / 1e6:.1f} MB, {time.monotonic() - start:.0f} s")
    return checks


def _require_encoder(source: Source) -> None:
    config = source.config
    architecture = (config.get("architectures") or ["a model without architectures"])[0]
    mappings = (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    )
    kind = str(config.get("model_type"))
    # Text encoders are the models that can be trained as masked language models.
    encoder = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and kind not in _NOT_TEXT
    classes = [mapping.get(kind) for mapping in mappings]
    known = any(architecture in (found if isinstance(found, tuple) else (found,)) for found in classes)
    if (
        not (encoder and known)
        or _configured(source, "is_encoder_decoder")
        or _configured(source, "is_decoder")
    ):
        raise InputRefused(
            f"{source.path}: {architecture}: --format onnx takes encoders of text and their classifiers of sequences, tokens "
            "or answers only: leave --format out"
        )


def _configured(source: Source, key: str) -> bool:
    config = transformers.AutoConfig.from_pretrained(source.path, trust_remote_code=source.trust_remote_code)
    return bool(getattr(config, key, False))


class _Positional(nn.Module):
    """The model with tensors for arguments, in the order of ``inputs``, and a tuple of ``outputs``."""

    def __init__(self, model: nn.Module, inputs: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        answer = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(answer[name] for name in self.outputs)


def _probes(model: transformers.PreTrainedModel) -> list[_Probe]:
    """Random tokens as batches of several sizes, lengths and masks, padded to the right; the first is traced."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    known = inspect.signature(model.forward).parameters
    longest = min(160, int(getattr(config, "max_position_embeddings", None) or 512) // 2)
    types = getattr(config, "type_vocab_size", 0) if "token_type_ids" in known else 0
    probes = []
    for batch, share in ((3, 0.25), (1, 0.1), (4, 0.5), (2, 1.0)):
        length = max(4, round(longest * share))
        ids = torch.randint(0, config.vocab_size, (batch, length), generator=generator)
        valid = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
        valid[0] = length
        mask = torch.arange(length) < valid
        ids[~mask] = config.pad_token_id or 0
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if types > 1:  # with one, tokenizers leave it out
            inputs["token_type_ids"] = (torch.arange(length) >= length // 2).long().expand(batch, -1) * mask
        with torch.inference_mode():
            answer = model(**inputs)
        outputs = {name: value for name, value in answer.items() if isinstance(value, Tensor)}
        probes.append(_Probe(inputs, mask, outputs))
    return probes


def _export(model: nn.Module, probe: _Probe, file: Path, source: Source) -> None:
    inputs, outputs = list(probe.inputs), list(probe.outputs)
    free = torch.export.Dim.DYNAMIC
    try:
        with _silent():
            torch.onnx.export(
                _Positional(model, inputs, outputs).eval(),
                tuple(probe.inputs.values()),
                file,
                dynamo=True,
                input_names=inputs,
                output_names=outputs,
                dynamic_shapes=(tuple({0: free, 1: free} for _ in inputs),),
                external_data=True,  # FP32 can be more than the 2 GB of one file
                verbose=False,
            )
    except Exception as error:
        raise InputRefused(
            f"{source.path}: torch {torch.__version__} cannot export it to ONNX ({_first_line(error.__cause__ or error)}): leave --format out"
        ) from None
    import onnx

    # Each node says which lines of Python it is from: paths of this machine, which are no user's business.
    written = onnx.load(str(file), load_external_data=False)
    for node in written.graph.node:
        del node.metadata_props[:]
    onnx.save(written, str(file))


def _quantize(exported: Path, file: Path, source: Source) -> None:
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    try:
        with _silent():
            quantize_dynamic(exported, file, weight_type=QuantType.QInt8, per_channel=True)
    except Exception as error:
        raise InputRefused(
            f"{source.path}: onnxruntime {onnxruntime.__version__} cannot quantize it ({_first_line(error)}): leave --format out"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _silent() -> Iterator[None]:
    """:func:`quiet`, and nothing either from the exporter and ONNX Runtime, which log and warn about their own insides."""
    root = logging.getLogger()
    handler = logging.NullHandler()  # without one, ONNX Runtime's first line would set logging up
    root.addHandler(handler)
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        root.removeHandler(handler)


def _valid(file: Path) -> Check:
    import onnx

    try:
        onnx.checker.check_model(str(file))
    except onnx.checker.ValidationError as error:
        return Check("file", False, _first_line(error))
    return Check("file", True, "valid ONNX")


def _quantized(file: Path) -> Check:
    """Whether no product of an FP32 weight is left."""
    import onnx

    graph = onnx.load(str(file)).graph
    weights = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    left = [
        name for n in graph.node if n.op_type in ("MatMul", "Gemm") for name in n.input[:2] if name in weights
    ]
    done = sum(node.op_type == "MatMulInteger" for node in graph.node)
    return Check(
        "quantized weights",
        bool(done) and not left,
        f"{left[0]}: is FP32" if left else f"{done} products of INT8",
    )


def _same_outputs(file: Path, kind: str, probes: list[_Probe]) -> Check:
    """Hold the answers of ONNX Runtime to torch's.

    An answer is a token's or a sequence's vector. Held to the limit is, for FP32, the largest difference of a value, and for
    INT8 the root mean square of all, as a maximum would grow with the number of tokens; both over the standard deviation of
    that output over all probes. INT8's farthest answer (root mean square of its vector) is told. Padding is left out.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no base of their own
        return Check(f"{kind} outputs", False, f"ONNX Runtime cannot load it ({_first_line(error)})")
    names = list(probes[0].outputs)
    expected: dict[str, list[Tensor]] = {name: [] for name in names}
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    # The length is an axis of the outputs that have a vector for each token; it differs between probes.
    by_token = {name: all(_has_length(probe.outputs[name], probe.mask) for probe in probes) for name in names}
    for probe in probes:
        try:
            answers = session.run(names, {name: value.numpy() for name, value in probe.inputs.items()})
        except Exception as error:
            return Check(f"{kind} outputs", False, f"ONNX Runtime cannot run it ({_first_line(error)})")
        for name, answer in zip(names, answers, strict=True):
            wanted, got = probe.outputs[name], torch.from_numpy(answer)
            if got.shape != wanted.shape:
                return Check(
                    f"{kind} outputs", False, f"{name}: is {list(got.shape)} instead of {list(wanted.shape)}"
                )
            for values, into in ((wanted, expected), (got, found)):
                rows = values[probe.mask] if by_token[name] else values
                into[name].append(rows.float().reshape(len(rows), -1))
    worst, farthest = ("", 0.0), 0.0
    details = []
    for name in names:
        wanted, got = torch.cat(expected[name]), torch.cat(found[name])
        if not torch.isfinite(got).all():
            return Check(f"{kind} outputs", False, f"{name}: is not finite")
        deviation = wanted.std().clamp(min=1e-6)
        squared = ((got - wanted) / deviation).square()
        off = float(squared.max().sqrt() if kind == "FP32" else squared.mean().sqrt())
        farthest = max(farthest, float(squared.mean(1).max().sqrt()))
        worst = max(worst, (name, off), key=lambda pair: pair[1])
        if name == "logits" and wanted.shape[1] > 1:
            agreeing = int((wanted.argmax(1) == got.argmax(1)).sum())
            details.append(f"the same class for {agreeing} of {len(wanted)}")
    if kind == "INT8":
        details.insert(0, f"the farthest answer by {farthest:.2g}")
    detail = ", ".join([f"{worst[0]}: off by {worst[1]:.2g} of its deviation", *details])
    return Check(f"{kind} outputs", worst[1] <= _FARTHEST[kind], detail)


def _has_length(output: Tensor, mask: Tensor) -> bool:
    return output.shape[:2] == mask.shape
