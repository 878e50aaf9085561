"""Load models for a task and write students, as transformers does it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from compressor.distillation.tasks import TaskName
from compressor.errors import InputRefused
from compressor.evaluation import transformers_gaps
from compressor.evaluation.load import quiet
from compressor.graph.inputs import token_inputs
from compressor.graph.units import towers_of
from compressor.sources.model import Source, load_tokenizer

_CLASSES: dict[TaskName, Any] = {
    "causal-lm": transformers.AutoModelForCausalLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "classification": transformers.AutoModelForSequenceClassification,
    "multi-label": transformers.AutoModelForSequenceClassification,
    "regression": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
}
_PROBLEM = {
    "classification": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}


def load_model(
    source: Source,
    task: TaskName,
    *,
    device: str,
    arguments: dict[str, Any] | None = None,
    classes: Sequence[str] = (),
    new_head: bool = False,
    seed: int = 0,
) -> Any:
    """The model in ``source`` for ``task``, in eval mode on ``device``.

    ``arguments`` go to ``from_pretrained`` (dtype, quantization). With ``new_head`` a missing output layer is
    initialised from ``seed`` for ``classes``; without, it is refused, as is any other missing weight. Vision and audio
    towers are frozen: text does not pass through them.
    """
    given: dict[str, Any] = {"dtype": torch.float32, **(arguments or {})}
    if new_head:
        given["num_labels"] = max(len(classes), 1)
        if classes:
            given["id2label"] = dict(enumerate(classes))
            given["label2id"] = {name: i for i, name in enumerate(classes)}
        if task in _PROBLEM:
            given["problem_type"] = _PROBLEM[task]
    torch.manual_seed(seed)
    try:
        with quiet(), transformers_gaps.filled():
            model, info = _class_of(source, task).from_pretrained(
                source.path,
                trust_remote_code=source.trust_remote_code,
                use_safetensors=True,
                device_map={"": device},
                output_loading_info=True,
                **given,
            )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputRefused(f"{source.ref}: cannot be loaded for {task} ({reason})") from None
    missing = sorted(info["missing_keys"])
    heads = ("classifier", "score", "qa_outputs", "pooler", "pre_classifier", "classification_head")
    if new_head:
        missing = [name for name in missing if not any(part in name for part in heads)]
    if missing:
        raise InputRefused(
            f"{source.ref}: lacks {len(missing)} weights for {task}, first {missing[0]}: fine-tune it for the task "
            "first (--teacher-epochs), or choose another --task"
        )
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False
    model.eval()
    if source.quantized:
        # compressed-tensors unpacks the weights at the first forward pass.
        with quiet(), torch.inference_mode():
            model(**token_inputs(model, torch.zeros(1, 1, dtype=torch.int64, device=device)))
    for path in towers_of(model):
        model.get_submodule(path).requires_grad_(False)
    return model


def _class_of(source: Source, task: TaskName) -> Any:
    architecture = (source.config.get("architectures") or [""])[0]
    if task == "causal-lm" and architecture.endswith("ForConditionalGeneration"):
        return transformers.AutoModelForImageTextToText
    return _CLASSES[task]


def save_processor(source: Source, directory: Path) -> None:
    """The tokenizer of ``source``, and what prepares images and sound for it, byte for byte."""
    load_tokenizer(source).save_pretrained(directory)
    for file in source.path.glob("*processor_config.json"):
        shutil.copyfile(file, directory / file.name)


def save_student(model: Any, directory: Path, state: dict[str, Tensor]) -> None:
    """A plain checkpoint of ``model`` with the weights in ``state``."""
    used_cache = model.config.use_cache if hasattr(model.config, "use_cache") else None
    if used_cache is not None:
        model.config.use_cache = True
    try:
        with quiet():
            model.save_pretrained(directory, state_dict=state)
    finally:
        if used_cache is not None:
            model.config.use_cache = used_cache


def with_lora(model: Any, rank: int, seed: int) -> Any:
    """``model`` with low-rank adapters (Hu et al. 2021) of ``rank`` on all its linear layers; only they are trained.

    Raises MachineLimit when peft is not installed.
    """
    from importlib.util import find_spec

    from compressor.errors import MachineLimit

    if find_spec("peft") is None:
        raise MachineLimit("--lora needs peft: pip install peft")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
    return get_peft_model(model, config)
