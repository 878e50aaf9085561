"""The model as transformers builds it, with no weights in it: parameters on the meta device.

Small buffers that are computed rather than stored (rotary frequencies, for example) are real, so any
part of the skeleton runs once its own parameters are loaded. ``load`` and ``unload`` move one module's
parameters in and out, which is how a model larger than memory is worked on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.errors import InputRefused
from compressor.sources.model import Source
from compressor.sources.tensors import TensorEntry, read_tensor


@dataclass(frozen=True)
class Skeleton:
    """``module`` is the empty model; ``stored`` maps each parameter name to its tensor in the source.

    ``ties`` maps a parameter that is not stored to the stored parameter that it shares, as the
    architecture declares (``lm_head.weight`` to ``model.embed_tokens.weight``, for example).
    ``unused`` are stored tensors that the model class does not know.
    """

    source: Source
    module: PreTrainedModel
    stored: dict[str, TensorEntry]
    ties: dict[str, str]
    unused: tuple[str, ...]

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds most of the stored floating-point values."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.source.tensors.values():
            if entry.torch_dtype.is_floating_point:
                sizes[entry.torch_dtype] = sizes.get(entry.torch_dtype, 0) + entry.numel
        return max(sizes, key=lambda dtype: sizes[dtype])


def build_skeleton(source: Source) -> Skeleton:
    """Build the architecture that ``config.json`` names, without allocating its weights.

    Raises InputRefused when transformers does not know the architecture, or when the checkpoint's
    tensors do not match the model in name or shape (each mismatch named).
    """
    module = _empty_model(source)
    ties = _declared_ties(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    persistent = {name: b for name, b in module.named_buffers() if name in module.state_dict()}

    prefix = getattr(module, "base_model_prefix", "")
    stored: dict[str, TensorEntry] = {}
    missing = []
    for name in (*parameters, *persistent):
        entry = next(
            (source.tensors[alias] for alias in _aliases(name, prefix) if alias in source.tensors), None
        )
        if entry is not None:
            stored[name] = entry
        elif name not in ties and name in parameters:
            missing.append(name)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputRefused(
            f"{source.path}: {type(module).__name__} needs the tensor {missing[0]}{more}, which the checkpoint does not hold under that name"
        )
    ties = {alias: target for alias, target in ties.items() if alias not in stored}
    for name, entry in stored.items():
        shape = tuple((parameters | persistent)[name].shape)
        if shape != entry.shape:
            raise InputRefused(
                f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, but config.json makes it {list(shape)}"
            )
    used = {entry.name for entry in stored.values()}
    return Skeleton(source, module, stored, ties, tuple(sorted(set(source.tensors) - used)))


def load(
    skeleton: Skeleton, prefix: str, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> nn.Module:
    """Fill the parameters of the submodule named ``prefix`` and return it.

    Floating-point parameters are cast to ``dtype``. Tied parameters are filled from what they share.
    """
    module = skeleton.module.get_submodule(prefix)
    for name, _ in list(module.named_parameters(remove_duplicate=False)) + list(module.named_buffers()):
        full = f"{prefix}.{name}" if prefix else name
        entry = skeleton.stored.get(full) or skeleton.stored.get(skeleton.ties.get(full, ""))
        if entry is None:
            continue  # a computed buffer: already real
        value = read_tensor(entry).to(device=device)
        _set(module, name, value.to(dtype) if value.is_floating_point() else value)
    for name, buffer in list(module.named_buffers()):
        if buffer.device != torch.device(device):
            _set(module, name, buffer.to(device))
    return module


def unload(module: nn.Module) -> None:
    """Return every parameter of ``module`` to the meta device, freeing its memory."""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        _set(module, name, parameter.detach().to("meta"))


def set_weight(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace the parameter ``name`` (dotted) of ``module`` by ``value``."""
    _set(module, name, value)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    *path, leaf = name.split(".")
    owner = module.get_submodule(".".join(path))
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def _aliases(name: str, prefix: str) -> tuple[str, ...]:
    """Names under which checkpoints of this architecture store a parameter: as is, or without or with the
    base model's prefix (a base model's checkpoint loaded into a head model, and the reverse)."""
    if prefix and name.startswith(f"{prefix}."):
        return name, name.removeprefix(f"{prefix}.")
    return name, f"{prefix}.{name}"


def _declared_ties(module: PreTrainedModel) -> dict[str, str]:
    ties: dict[str, str] = {}
    if getattr(module.config.get_text_config(), "tie_word_embeddings", False):
        declared = getattr(module, "_tied_weights_keys", None) or {}
        if isinstance(declared, dict):
            ties |= declared
    return ties


def _empty_model(source: Source) -> PreTrainedModel:
    import transformers
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=source.trust_remote_code)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputRefused(
            f"{source.path / 'config.json'}: transformers {transformers.__version__} cannot read it ({reason})"
        ) from None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    architecture = (getattr(config, "architectures", None) or [""])[0]
    known = getattr(transformers, architecture, None)
    try:
        with init_empty_weights(include_buffers=False):
            if known is not None and not source.trust_remote_code:
                model = known._from_config(config)
            else:
                auto = AutoModelForCausalLM if "CausalLM" in architecture else AutoModel
                model = auto.from_config(config, trust_remote_code=source.trust_remote_code)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputRefused(
            f"{source.path / 'config.json'}: cannot build {architecture or 'the model'} ({reason})"
        ) from None
    return model.eval().requires_grad_(False)
