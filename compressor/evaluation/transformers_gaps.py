"""What transformers 5.24 lacks to load some checkpoints that it could run, filled in while they load.

* compressed-tensors quantizes Linear modules, and GPT-2's layers are ``Conv1D``: those that the checkpoint holds
  quantized become Linear, which is what they are but for the order of their axes.
* After loading, Mamba's ``_init_weights`` touches ``out_proj.weight`` although nothing is left to initialise, and a
  packed layer has no ``weight`` yet: such modules are left as they were loaded.

* Where experts stay as they are, their converter still expects packed ones: it passes on what it gets.

vLLM needs none of this. Each part can go when transformers has it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.compressed_tensors import CompressedTensorsDequantize
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer


@contextmanager
def filled() -> Iterator[None]:
    """Inside, ``from_pretrained`` loads what it cannot by itself."""
    prepare = CompressedTensorsHfQuantizer._process_model_before_weight_loading
    decompress = CompressedTensorsDequantize.convert
    initialize = PreTrainedModel._initialize_weights

    def with_linears(quantizer: Any, model: nn.Module, **kwargs: Any) -> Any:
        groups = quantizer.compressor.quantization_config.config_groups.values()
        as_linear(model, {target for group in groups for target in group.targets})
        return prepare(quantizer, model, **kwargs)

    def unless_packed(model: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        try:
            initialize(model, module, *args, **kwargs)
        except AttributeError:
            if not any(hasattr(child, "quantization_scheme") for child in module.modules()):
                raise

    def with_dense(operation: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if input_dict and all("experts" in key and key.endswith(".weight") for key in input_dict):
            return input_dict
        return decompress(operation, input_dict, *args, **kwargs)

    with (
        patch.object(CompressedTensorsHfQuantizer, "_process_model_before_weight_loading", with_linears),
        patch.object(CompressedTensorsDequantize, "convert", with_dense),
        patch.object(PreTrainedModel, "_initialize_weights", unless_packed),
    ):
        yield


def as_linear(model: nn.Module, names: set[str]) -> None:
    """Put a Linear in the place of each ``Conv1D`` called one of ``names``; weights are not carried over."""
    for name, module in list(model.named_modules()):
        if name in names and isinstance(module, Conv1D):
            in_features, out_features = module.weight.shape
            linear = nn.Linear(
                in_features,
                out_features,
                bias=module.bias is not None,
                device=module.weight.device,
                dtype=module.weight.dtype,
            )
            model.set_submodule(name, linear)
