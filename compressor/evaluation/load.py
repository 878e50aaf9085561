"""Load a checkpoint as a user of transformers would get it, so that what is measured is what is served."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from loguru import logger as loguru_logger
from transformers.models.auto import modeling_auto

from compressor.checkpoint import kv_cache
from compressor.errors import InputRefused, MachineLimit
from compressor.evaluation import transformers_gaps
from compressor.graph.inputs import token_inputs

Task = Literal["causal-lm", "masked-lm", "embedding"]


def task_of(config: dict[str, Any], path: Path) -> Task:
    """What a checkpoint is evaluated as, by the class its parsed ``config.json`` names.

    Raises InputRefused for classes that are neither decoders with a language-model head, masked
    language models nor bare encoders.
    """
    architecture = _architecture(config, path)
    if config.get("is_encoder_decoder"):
        raise InputRefused(f"{path}: {architecture} is an encoder-decoder, which evaluate does not support")
    if architecture in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return "masked-lm"
    if architecture in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or architecture.endswith(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    ):
        return "causal-lm"
    if architecture.endswith("Model"):
        return "embedding"
    raise InputRefused(f"{path}: evaluate supports causal, masked and embedding models, not {architecture}")


def load_for_evaluation(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    simulate_cache: bool = True,
) -> transformers.PreTrainedModel:
    """The model in ``path``, of the class its config names, ready to be scored.

    It takes transformers' default loading path. A compressed-tensors checkpoint is decompressed here by
    a first forward pass of one token, and keeps quantizing activations where its scheme says so;
    ``dequantize=True`` is not used, as transformers 5.24 decodes mixed checkpoints wrongly with it.
    ``dtype`` is float32, bfloat16, float16 or auto (that of the config). A quantized cache of keys and values, where the
    checkpoint declares one, is simulated unless ``simulate_cache`` is off.

    Raises InputRefused when the checkpoint cannot be loaded or lacks a weight of the model (transformers
    would fill it with random numbers), MachineLimit when memory does not suffice.
    """
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    model_class = _model_class(config.to_dict(), path, trust_remote_code)
    try:
        with quiet(), transformers_gaps.filled():
            model, info = model_class.from_pretrained(
                path,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                device_map={"": device},
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except torch.OutOfMemoryError:
        raise MachineLimit(
            f"{path}: does not fit in the memory of {device}: choose another --device"
        ) from None
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise InputRefused(f"{path}: transformers cannot load it ({_first_line(error)})") from None
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise InputRefused(
            f"{path}: lacks {len(missing)} weights of {model_class.__name__}, first {missing[0]}"
        )
    if info["mismatched_keys"]:
        name, stored, expected = sorted(info["mismatched_keys"])[0]
        raise InputRefused(
            f"{path}: {name} has shape {list(stored)}, and its config.json asks for {list(expected)}"
        )

    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False  # nothing is generated, so keys and values are not kept
    model.eval()
    if simulate_cache and kv_cache.declared(config.to_dict()):
        kv_cache.simulate_cache(model, path)
    with quiet(), torch.inference_mode():
        model(**token_inputs(model, torch.zeros(1, 1, dtype=torch.int64, device=device)))
    return model


def _architecture(config: dict[str, Any], path: Path) -> str:
    architectures = config.get("architectures")
    if not architectures:
        raise InputRefused(
            f"{path / 'config.json'}: names no architecture: add the model's class to architectures"
        )
    return str(architectures[0])


def _model_class(config: dict[str, Any], path: Path, trust_remote_code: bool) -> Any:
    architecture = _architecture(config, path)
    known = getattr(transformers, architecture, None)
    if known is not None:
        return known
    for name, reference in (config.get("auto_map") or {}).items():
        if trust_remote_code and str(reference).endswith(f".{architecture}"):
            return getattr(transformers, name)
    raise InputRefused(
        f"{path}: transformers {transformers.__version__} has no class {architecture}: upgrade it, "
        "or pass --trust-remote-code if the checkpoint brings its own"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, load reports or log lines from transformers and compressed-tensors; errors still raise."""
    log = logging.getLogger("transformers")
    level, bars = log.level, transformers.utils.logging.is_progress_bar_enabled()
    log.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    loguru_logger.disable("compressed_tensors")
    try:
        with redirect_stderr(io.StringIO()):  # compressed-tensors draws its bars with tqdm unconditionally
            yield
    finally:
        loguru_logger.enable("compressed_tensors")
        log.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()
