"""What a model is called with to read text, whatever it can read besides."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

TEXT, SPEECH = "input_ids", "input_features"


def reads_speech(model: PreTrainedModel) -> bool:
    """Whether the model's encoder takes features of audio, as Whisper's does."""
    return bool(model.main_input_name == SPEECH)


def config_reads_speech(config: dict[str, Any]) -> bool:
    """The same by the class that a parsed ``config.json`` names."""
    known = getattr(transformers, (config.get("architectures") or [""])[0], None)
    return getattr(known, "main_input_name", TEXT) == SPEECH


def is_causal(model: PreTrainedModel) -> bool:
    """Whether the model predicts the next token of its own input."""
    name = type(model).__name__
    if "CausalLM" in name or "LMHead" in name:
        return True
    return name.endswith("ForConditionalGeneration") and not model.config.is_encoder_decoder


def token_inputs(model: PreTrainedModel, input_ids: Tensor) -> dict[str, Any]:
    """The arguments for ``input_ids`` [batch, length]; an encoder-decoder's decoder reads them too.

    The encoder of a model for speech gets the same made-up features each time: they serve to compare two computations
    and tell nothing of accuracy.
    """
    inputs: dict[str, Any] = {TEXT: input_ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = input_ids
    if reads_speech(model):
        del inputs[TEXT]
        config = model.config
        shape = (config.num_mel_bins, 2 * config.max_source_positions)  # its convolutions halve the frames
        features = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        inputs[SPEECH] = features.expand(len(input_ids), -1, -1).to(input_ids.device, model.dtype)
    return inputs
