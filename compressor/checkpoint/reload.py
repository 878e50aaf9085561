"""The proof by transformers: what a fresh process loads is what was written, weight for weight, and answers alike."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.checkpoint import kv_cache
from compressor.checkpoint.artifact import Artifact
from compressor.checkpoint.engine_transformers import answers, digest
from compressor.checkpoint.file_checks import Failed, Skipped, decoded, plan_of
from compressor.errors import MachineLimit
from compressor.formats import Format, fake_quantize_activations
from compressor.sources.builtin_text import builtin_text
from compressor.sources.tensors import read_header, read_tensor

_TIMEOUT = 3600  # seconds

# Shares of the outputs' standard deviation. Where only weights are quantized, other orders of summation show in
# the last bits only. Where inputs are too, they push values over the edge between two codes, and that grows
# from layer to layer: for a SmolLM2-135M in W8A8, fp32 and fp64 are 0.08 apart on average (and agree on 88 % of
# first choices), while one layer with its rows in the wrong order is 0.35 off.
_LARGEST = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
_MEAN_WITH_QUANTIZED_INPUTS = 0.2
_MEAN_WITH_QUANTIZED_CACHE = 0.01  # a code that falls the other way moves one of many keys by a 16th
_LAST_BITS = 1e-4


@dataclass(frozen=True)
class Reloaded:
    """What transformers made of the checkpoint: see ``engine_transformers``."""

    report: dict[str, Any]
    outputs: list[Tensor]


@dataclass(frozen=True)
class Reload:
    """One checkpoint, loaded by transformers on one side and decoded here on the other, each at most once."""

    artifact: Artifact
    trust_remote_code: bool

    @cached_property
    def sequences(self) -> list[list[int]]:
        return token_sequences(self.artifact, self.trust_remote_code, count=2, length=64)

    @property
    def theirs(self) -> Reloaded:
        """What transformers loaded. Raises Failed or Skipped."""
        if isinstance(self._attempt, Exception):
            raise self._attempt
        return self._attempt

    @cached_property
    def _attempt(self) -> Reloaded | Failed | Skipped:
        # A failure is remembered too: the process is started once, however many checks ask.
        try:
            _require_memory(self.artifact)
            return load_in_transformers(self.artifact.path, self.sequences, self.trust_remote_code)
        except (Failed, Skipped) as reason:
            return reason

    @cached_property
    def ours(self) -> PreTrainedModel:
        return dense_model(self.artifact, self.theirs.report)


def check_reloaded_weights(reload: Reload) -> str:
    """Every weight that transformers holds after decompression is, bit for bit, what the stored bytes mean."""
    artifact, report = reload.artifact, reload.theirs.report
    held: dict[str, str] = report["weights"]

    def of(name: str) -> str | None:
        return next((held[alias] for alias in _aliases(name, report) if alias in held), None)

    layers = others = 0
    for layer, fmt in artifact.formats.items():
        if fmt is None:
            continue
        if of(f"{layer}.weight") != digest(
            decoded(artifact, layer).dequantize(_dtype(report, f"{layer}.weight"))
        ):
            raise Failed(f"{layer}: transformers decodes it to other weights than are stored")
        layers += 1
    for name, entry in artifact.tensors.items():
        if name.rpartition(".")[0] in artifact.formats or of(name) is None:
            continue
        if of(name) != digest(read_tensor(entry).to(_dtype(report, name))):
            raise Failed(f"{name}: transformers loads other values than are stored")
        others += 1
    return f"{layers} layers and {others} other tensors equal in {report['engine']}"


def _aliases(name: str, report: dict[str, Any]) -> tuple[str, ...]:
    prefix = report["prefix"]
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


def _dtype(report: dict[str, Any], name: str) -> torch.dtype:
    """What transformers holds a weight in: the model's dtype, but for a few that it keeps in fp32 (T5's ``wo``)."""
    own = (report["dtypes"][alias] for alias in _aliases(name, report) if alias in report["dtypes"])
    return getattr(torch, next(own, report["dtype"]))


def check_reloaded_outputs(reload: Reload) -> str:
    """The model that transformers loads answers as the stored bytes decoded here do.

    Both compute in fp32 with weights rounded to the model's dtype, so all but the last bits must be equal where only
    weights are quantized. (The order of a product's sums may depend on where its operands lie in memory.)
    """
    ours, theirs = torch.cat(answers(reload.ours, reload.sequences)), torch.cat(reload.theirs.outputs)
    line = f"{sum(len(ids) for ids in reload.sequences)} tokens"
    if torch.equal(ours, theirs):
        return f"{line}: identical"
    return _close(line, ours, theirs, float(ours.std()), _allowed(reload.artifact, _LAST_BITS))


def check_probe(reload: Reload) -> str:
    """The stored bytes answer as the fake-quantized model in memory did, when it was quantized."""
    probe = plan_of(reload.artifact).probe
    if probe is None:
        raise Skipped("compression.json holds no probe")
    answer = answers(reload.ours, [probe.input_ids])[0][probe.positions]
    found = torch.cat(
        [answer.gather(-1, torch.tensor(probe.top_ids)), answer.logsumexp(-1, keepdim=True)], -1
    )
    stated = torch.cat([torch.tensor(probe.top_logits), torch.tensor(probe.logsumexp)[:, None]], -1)
    allowed = _allowed(reload.artifact, _LARGEST.get(probe.dtype, _LARGEST["bfloat16"]))
    return _close(f"{len(probe.positions)} positions", found, stated, float(answer.std()), allowed)


def _allowed(artifact: Artifact, largest: float) -> tuple[str, float]:
    """What may differ and by how much: the ``largest`` difference, or the mean one where values on the edge between two
    codes fall either way."""
    if _quantizes_inputs(artifact):
        return "mean", _MEAN_WITH_QUANTIZED_INPUTS
    if kv_cache.declared(artifact.config):
        return "mean", max(largest, _MEAN_WITH_QUANTIZED_CACHE)
    return "largest", largest


def _close(what: str, a: Tensor, b: Tensor, deviation: float, limit: tuple[str, float]) -> str:
    """How far apart outputs are; raises Failed above the ``limit`` that :func:`_allowed` gives."""
    share = (a - b).abs() / deviation
    kind, allowed = limit
    found = float(share.mean() if kind == "mean" else share.max())
    line = f"{what}: {kind} difference {found:.2g} of the outputs' deviation (allowed {allowed})"
    if not found <= allowed:
        raise Failed(line)
    return line


def load_in_transformers(
    path: Path,
    sequences: list[list[int]],
    trust_remote_code: bool,
    *,
    dtype: str = "auto",
    upcast: bool = True,
) -> Reloaded:
    """Run ``engine_transformers`` in a fresh process. Raises Failed when it cannot load or run the checkpoint."""
    with tempfile.TemporaryDirectory(prefix="compressor-") as name:
        directory = Path(name)
        request = {
            "model": str(path.resolve()),
            "input_ids": sequences,
            "trust_remote_code": trust_remote_code,
            "dtype": dtype,
            "upcast": upcast,
            "threads": torch.get_num_threads(),
        }
        (directory / "request.json").write_text(json.dumps(request), "utf-8")
        package = str(Path(__file__).parents[2])
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "compressor.checkpoint.engine_transformers", "request.json", "."]
        errors = run_process(command, directory, environment)
        try:
            report = json.loads((directory / "report.json").read_text("utf-8"))
        except OSError:
            raise Failed(f"transformers: the process ended without a report: {errors}") from None
        if "error" in report:
            raise Failed(f"transformers: {report['error']}")
        entries, _ = read_header(directory / "outputs.safetensors")
        return Reloaded(report, [read_tensor(entries[str(i)]) for i in range(len(sequences))])


def run_process(command: list[str], directory: Path, environment: dict[str, str]) -> str:
    """Run an engine in ``directory`` and return the last line it wrote to standard error.

    Raises Failed when it does not end in an hour, MachineLimit when it cannot be started.
    """
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]}: did not end in {_TIMEOUT} s") from None
    except OSError as error:
        raise MachineLimit(f"{command[0]}: cannot be run ({error.strerror})") from None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else f"exit status {done.returncode}"


def dense_model(artifact: Artifact, report: dict[str, Any]) -> PreTrainedModel:
    """The model with the stored bytes decoded here, in fp32, with inputs quantized where the format says so.

    Weights are rounded to the model's dtype first, as an engine holds them.
    """
    import accelerate
    import transformers
    from transformers.pytorch_utils import Conv1D

    from compressor.evaluation.load import quiet

    model_class = getattr(transformers, report["class"], None)
    if model_class is None:
        raise Skipped(f"{report['class']} is the checkpoint's own code")
    if None in artifact.formats.values():
        raise Skipped("some layers have schemes without a name here")
    dtype = getattr(torch, report["dtype"])
    weights = {}
    for name, entry in artifact.tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf in kv_cache.LEAVES:
            continue
        if layer not in artifact.formats or leaf == "bias":
            weights[name] = read_tensor(entry)
    for layer in artifact.formats:
        weights[f"{layer}.weight"] = decoded(artifact, layer).dequantize(_dtype(report, f"{layer}.weight"))
    config = transformers.AutoConfig.from_pretrained(artifact.path)
    del config.quantization_config
    with accelerate.init_empty_weights():
        modules = dict(model_class(config).named_modules())
    for layer in artifact.formats:
        if isinstance(modules.get(layer), Conv1D):
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"].T.contiguous()
    with quiet():
        model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False  # as in the model that it is compared with
    model = model.eval().float()
    for layer, fmt in artifact.formats.items():
        if fmt is not None and fmt.activations is not None:
            _module(model, layer).register_forward_pre_hook(_quantize_input(fmt))
    if kv_cache.declared(artifact.config):
        kv_cache.simulate_cache(model, artifact.path)
    return model


def token_sequences(
    artifact: Artifact, trust_remote_code: bool, *, count: int, length: int
) -> list[list[int]]:
    """``count`` sequences of built-in text in the checkpoint's own tokens, or of arbitrary tokens if it has no
    tokenizer; shorter than ``length`` where the model's positions end before."""
    from transformers import AutoConfig, AutoTokenizer

    # Published configs leave out what is the class's default, so the file alone does not say.
    config = AutoConfig.from_pretrained(artifact.path, trust_remote_code=trust_remote_code).get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or length
    length = max(4, min(length, limit // 2))
    vocabulary = config.vocab_size
    try:
        tokenizer = AutoTokenizer.from_pretrained(artifact.path, trust_remote_code=trust_remote_code)
        texts = [document.text for document in builtin_text("test") if len(document.text) > 8 * length]
        sequences = [tokenizer(text)["input_ids"][:length] for text in texts[:count]]
        whole = len(sequences) == count and all(len(ids) == length for ids in sequences)
        if whole and max(map(max, sequences)) < vocabulary:
            return sequences
    except Exception:  # whatever is wrong with the tokenizer, weights can be compared without it
        pass
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (count, length), generator=generator).tolist()


def _quantizes_inputs(artifact: Artifact) -> bool:
    return any(fmt is not None and fmt.activations is not None for fmt in artifact.formats.values())


def _quantize_input(fmt: Format) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda _, args: (fake_quantize_activations(args[0], fmt), *args[1:])


def _module(model: nn.Module, layer: str) -> nn.Module:
    prefix = getattr(model, "base_model_prefix", "")
    modules = dict(model.named_modules())
    names = (layer, f"{prefix}.{layer}", layer.removeprefix(f"{prefix}."))
    return next(modules[name] for name in names if name in modules)


def _require_memory(artifact: Artifact) -> None:
    """Raise Skipped when the fp32 model of one process does not fit."""
    parameters = sum(
        e.numel for n, e in artifact.tensors.items() if n.rpartition(".")[0] not in artifact.formats
    )
    for layer in artifact.formats:
        entries = artifact.by_layer[layer]
        if "weight" in entries:
            parameters += entries["weight"].numel
        elif "weight_shape" in entries:
            parameters += int(read_tensor(entries["weight_shape"]).prod())
    needed = 7 * parameters + 10**9  # the compressed and the decompressed model exist together for a moment
    available = psutil.virtual_memory().available
    if needed > available:
        raise Skipped(f"needs about {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free")
