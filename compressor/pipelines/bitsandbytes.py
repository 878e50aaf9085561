"""Another output of ``quantize``: weights as bitsandbytes stores them (NF4, INT8), for transformers and QLoRA.

bitsandbytes rounds by itself and to one scheme, so plans, calibration and formats of compressor's do not apply.
transformers writes the files, and the proof is that it loads them again: every layer that was to be quantized is, every
other weight is bit for bit the original's, and the reloaded model answers as the one that was saved.
"""

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from compressor.checkpoint.verify import Check
from compressor.checkpoint.writer import CheckpointWriter
from compressor.console import note
from compressor.errors import InputRefused, UsageError
from compressor.evaluation.load import quiet, token_inputs
from compressor.formats import DENSE, parse_format
from compressor.graph import build_skeleton, discover
from compressor.graph.assign import uniform_plan
from compressor.pipelines.job import choose_device
from compressor.pipelines.other_format import carry_files, open_for, publish_checked
from compressor.recipes import Recipe

_BLOCK = 64  # weights that share a scale in NF4
_EXPRESSED = {"format", "scheme", "ignore"}  # settings that bitsandbytes has, too
_FARTHEST = {"nf4": 0.2, "int8": 0.05}  # error of a weight relative to its norm; of normal ones 0.09 and 0.01


def write_bitsandbytes(recipe: Recipe, target: Path | None, *, overwrite: bool, dry_run: bool) -> list[Check]:
    """Quantize ``recipe.model`` to ``target`` and prove it by reloading; the checks that it passed.

    Raises UsageError for settings that the format cannot express, MachineLimit without bitsandbytes, InputRefused for
    layers that it has no form for, VerificationFailed when the reloaded model is another.
    """
    settings = recipe.quantize
    scheme = settings.scheme if "scheme" in settings.model_fields_set else "nf4"
    source = open_for(
        recipe,
        target,
        expressed=_EXPRESSED,
        packages=("bitsandbytes",),
        extra="bnb",
        overwrite=overwrite,
        dry_run=dry_run,
    )
    skeleton = build_skeleton(source)
    graph = discover(skeleton)
    other = next((layer for layer in graph.layers if layer.form != "linear"), None)
    if other is not None:
        raise InputRefused(
            f"{other.name}: it is a {other.form}, and --format bitsandbytes is for Linear layers"
        )
    plan = uniform_plan(skeleton, graph, parse_format("w8"), ignore=settings.ignore)
    planned = set(plan.quantized())
    if not planned:
        raise UsageError(f"{recipe.model}: no layer is left to quantize: change --ignore")
    device = str(choose_device(recipe.device))
    odd = next((x for x in graph.layers if x.name in planned and x.in_features % _BLOCK), None)
    if scheme == "nf4" and device == "cpu" and odd is not None:
        raise InputRefused(
            f"{odd.name}: has {odd.in_features} inputs, and on a CPU bitsandbytes runs NF4 for multiples of {_BLOCK} only: "
            "use --scheme int8, --ignore or --device cuda"
        )
    if dry_run:
        note(f"{len(planned)} layers as {scheme}, {len(plan.kept())} kept")
        return []
    assert target is not None

    start = time.monotonic()
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    model_class = type(skeleton.module)
    # All that is kept, by full name: a list given to transformers replaces its own, which spares the head.
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=scheme == "nf4",
        load_in_8bit=scheme == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=skeleton.dtype,
        llm_int8_skip_modules=list(plan.kept()),
    )
    with CheckpointWriter(target, {"format": "bitsandbytes", "scheme": scheme}, overwrite) as writer:
        with quiet():
            model = model_class.from_pretrained(
                source.path, quantization_config=quantization, dtype=skeleton.dtype, device_map={"": device}
            )
        built = writer.build()
        with quiet():
            model.save_pretrained(built)
        before = _answer(model)  # not earlier: on a CPU, a forward pass packs the weights in another way
        del model
        carry_files(source, built)
        note("verifying")
        with quiet():
            again = model_class.from_pretrained(built, dtype=skeleton.dtype, device_map={"": device})
        originals = {name: skeleton.read(name) for name in skeleton.stored}
        checks = _checks(again, planned, originals, before, _FARTHEST[scheme])
        publish_checked(writer, checks)
    note(
        f"{target}: {len(planned)} layers as {scheme}, {DENSE.name} elsewhere, {time.monotonic() - start:.0f} s"
    )
    return checks


def _answer(model: PreTrainedModel) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, 32), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.inference_mode():
        output = model(**token_inputs(model, ids))
    logits = getattr(output, "logits", None)
    return (logits if logits is not None else output[0]).float().cpu()


def _checks(
    model: PreTrainedModel, planned: set[str], originals: dict[str, Tensor], before: Tensor, farthest: float
) -> list[Check]:
    found: dict[str, Any] = {n: m for n, m in model.named_modules() if "bitsandbytes" in type(m).__module__}
    differing = sorted(set(found) ^ planned)
    checks = [
        Check(
            "layers",
            not differing,
            f"{differing[0]}: not as planned" if differing else f"{len(found)} layers",
        )
    ]
    worst = ("", 0.0)
    for name in sorted(set(found) & planned):
        original = originals[f"{name}.weight"].float()
        error = float((_dense(found[name]) - original).norm() / original.norm().clamp(min=1e-30))
        worst = max(worst, (name, error if math.isfinite(error) else math.inf), key=lambda pair: pair[1])
    checks.append(
        Check("quantized weights", worst[1] <= farthest, f"{worst[0]}: off by {worst[1]:.3f} of its norm")
    )
    other = next(
        (
            name
            for name, value in model.state_dict().items()
            if name in originals and name.rpartition(".")[0] not in planned
            if not torch.equal(value.cpu(), originals[name].to(value.dtype))
        ),
        None,
    )
    checks.append(Check("kept tensors", other is None, f"{other}: differs" if other else "as in the source"))
    after = _answer(model)
    same = bool(torch.isfinite(after).all()) and torch.equal(before, after)
    checks.append(Check("reloaded outputs", same, "identical" if same else "differ from those before saving"))
    return checks


def _dense(layer: Any) -> Tensor:
    """The weight [out, in] in fp32 that a layer of bitsandbytes computes with."""
    import bitsandbytes.functional as functional

    weight = layer.weight
    if getattr(weight, "quant_state", None) is not None:
        return functional.dequantize_4bit(weight.data, weight.quant_state).float().cpu()
    scale = weight.SCB if weight.SCB is not None else layer.state.SCB
    return (weight.data.float() * scale.float()[:, None] / 127).cpu()
