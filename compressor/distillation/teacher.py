"""The teacher while it is running: on its own device, in its own precision, never changed, never saved."""

import logging
from typing import Any

import torch

from compressor.distillation.forward import RowModel, TeacherRows
from compressor.distillation.losses import softened
from compressor.distillation.tasks import Batch


class LiveTeacher:
    """Computes targets for a batch. ``vocabulary`` cuts its logits to the ids it shares with the student."""

    def __init__(self, model: RowModel, *, temperature: float, vocabulary: int | None) -> None:
        self.model, self._temperature, self._vocabulary = model, temperature, vocabulary
        self.model.bare.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return next(self.model.bare.parameters()).device

    @torch.no_grad()
    def __call__(self, batch: Batch, *, hidden_states: bool = False) -> TeacherRows:
        """Targets on the device of ``batch``; big logits are made a chunk at a time, when they are asked for."""
        home = batch.labels.device
        rows = self.model(batch.to(self.device), hidden_states=hidden_states)
        output = rows.output if hidden_states else None
        if self.model.task in ("multi-label", "regression"):
            assert rows.logits is not None
            return TeacherRows(logits=rows.logits.to(home), output=output)

        def targets(start: int, stop: int) -> torch.Tensor:
            with torch.no_grad():
                logits = rows.chunk_logits(start, stop, self._vocabulary)
                return softened(logits, self._temperature).to(home)

        return TeacherRows(targets=targets, output=output)


@torch.no_grad()
def mass_outside(model: RowModel, batch: Batch, vocabulary: int) -> float:
    """Mean probability that the teacher gives to ids the student does not have, over the rows of ``batch``."""
    rows = model(batch)
    total, count = 0.0, int(batch.labels.shape[0])
    for start in range(0, count, 64):
        p = softened(rows.chunk_logits(start, start + 64, None), 1.0).exp()
        total += float(p[:, vocabulary:].sum())
    return total / max(count, 1)


def teacher_dtype(name: str, device: str) -> dict[str, Any]:
    """Arguments for ``from_pretrained``. ``auto`` is the dtype stored (the caller widens it to float32 on a CPU); int8 and nf4 quantize, when asked for.

    Raises MachineLimit when bitsandbytes is not installed.
    """
    if name not in ("int8", "nf4"):
        return {"dtype": name if name == "auto" else getattr(torch, name)}
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    from compressor.errors import MachineLimit

    if find_spec("bitsandbytes") is None:
        raise MachineLimit(f"--teacher-dtype {name} needs bitsandbytes: pip install 'compressor[bnb]'")
    compute = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    if name == "int8":
        # Said once for every layer and step; that int8 computes in float16 is what was asked for.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
    return {"quantization_config": quantization, "dtype": compute}
