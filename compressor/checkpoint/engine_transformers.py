"""A process of its own that loads a checkpoint as any user of transformers would, and says what it got.

    python -m compressor.checkpoint.engine_transformers REQUEST.json DIRECTORY

It knows nothing of how the checkpoint was made. ``DIRECTORY`` receives ``report.json`` (the model's class
and dtype, the dtypes of weights that have another, the SHA-256 of every weight as the model holds it after its first forward pass, or the error)
and ``outputs.safetensors`` (one tensor [tokens, vocabulary] per sequence, named by its number).
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from compressor.errors import CompressorError
from compressor.evaluation.load import load_for_evaluation
from compressor.graph.inputs import token_inputs


def answers(model: PreTrainedModel, sequences: list[list[int]]) -> list[Tensor]:
    """The logits [tokens, vocabulary] of each sequence in fp32 ([1, labels] of a classifier), or the last hidden state
    of a model without a head."""
    results = []
    with torch.inference_mode():
        for ids in sequences:
            output = model(**token_inputs(model, torch.tensor([ids])))
            logits = getattr(output, "logits", None)
            answer = (logits if logits is not None else output[0])[0]
            results.append(torch.atleast_2d(answer).float().clone())
    return results


def as_stored(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` under the names and in the form that checkpoints store them, where transformers changes them: experts
    one by one, for example."""
    loaded_by = model.__dict__.pop(
        "_weight_conversions", None
    )  # these know of quantization, and weights are dense now
    try:
        return revert_weight_conversion(model, weights)
    finally:
        if loaded_by is not None:
            model._weight_conversions = loaded_by


def digest(value: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def main() -> None:
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    directory = Path(sys.argv[2])
    torch.set_num_threads(request["threads"])
    try:
        report, outputs = _serve(request)
    except (CompressorError, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        report, outputs = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}, []
    save_file({str(i): value for i, value in enumerate(outputs)}, directory / "outputs.safetensors")
    (directory / "report.json").write_text(json.dumps(report), "utf-8")


def _serve(request: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    import compressed_tensors
    import transformers

    model = load_for_evaluation(
        Path(request["model"]), dtype=request["dtype"], trust_remote_code=request["trust_remote_code"]
    )
    dtype = model.dtype
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    held |= as_stored(model, held)
    weights = {name: digest(value) for name, value in held.items()}
    dtypes = {n: str(v.dtype).removeprefix("torch.") for n, v in held.items() if v.dtype != dtype}
    if request["upcast"]:
        with torch.inference_mode():  # as its weights were made
            nn.Module.float(model)  # the model's own float() refuses, though its weights are dense by now
    report = {
        "engine": f"transformers {transformers.__version__} with compressed-tensors {compressed_tensors.__version__}",
        "class": type(model).__name__,
        "prefix": model.base_model_prefix,
        "dtype": str(dtype).removeprefix("torch."),
        "weights": weights,
        "dtypes": dtypes,
    }
    return report, answers(model, request["input_ids"])


if __name__ == "__main__":
    main()
