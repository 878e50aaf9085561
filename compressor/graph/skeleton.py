"""The model as transformers builds it, with no weights in it: parameters on the meta device.

Small buffers that are computed rather than stored (rotary frequencies, for example) are real, so any
part of the skeleton runs once its own parameters are loaded. ``load`` and ``unload`` move one module's
parameters in and out, which is how a model larger than memory is worked on.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compressor.errors import InputRefused
from compressor.graph import rename
from compressor.sources.model import Source
from compressor.sources.tensors import TensorEntry, read_tensor


@dataclass(frozen=True)
class Skeleton:
    """``module`` is the empty model; ``stored`` maps each parameter name to its tensor in the source.

    ``ties`` maps a parameter that is not stored to the stored parameter that it shares, as the
    architecture declares (``lm_head.weight`` to ``model.embed_tokens.weight``, for example).
    ``transposed`` are parameters that are stored [in, out]; ``unused`` are stored tensors that the model class does
    not know.

    Layers that transformers computes with but that checkpoints and engines know in another form have that form
    here: GPT-2's ``Conv1D`` is a Linear, and 3-D stacks of experts are :class:`~compressor.graph.experts.Experts`.
    """

    source: Source
    module: PreTrainedModel
    stored: dict[str, TensorEntry]
    ties: dict[str, str]
    unused: tuple[str, ...]
    transposed: frozenset[str] = frozenset()

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds most of the stored floating-point values."""
        return _dtype(self.source)

    def stored_name(self, layer: str) -> str:
        """What the checkpoint calls a layer: transformers loads some under other names."""
        return self.stored[f"{layer}.weight"].name.removesuffix(".weight")

    def read(self, name: str) -> Tensor:
        """The stored value of a parameter, in the parameter's own shape."""
        value = read_tensor(self.stored[name])
        return value.T.contiguous() if name in self.transposed else value


def build_skeleton(source: Source) -> Skeleton:
    """Build the architecture that ``config.json`` names, without allocating its weights.

    Raises InputRefused when transformers does not know the architecture, or when the checkpoint's
    tensors do not match the model in name or shape (each mismatch named).
    """
    module = _empty_model(source)
    stored = rename.to_parameters(module, source)
    transposed = frozenset(f"{name}.weight" for name in _as_linear(module))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    persistent = {name: b for name, b in module.named_buffers() if name in module.state_dict()}
    stored = {name: stored[name] for name in (*parameters, *persistent) if name in stored}
    ties = _declared_ties(module, stored)

    missing = [name for name in parameters if name not in stored and name not in ties]
    missing = [name for name in missing if not _computed(module, name, _dtype(source))]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputRefused(
            f"{source.path}: {type(module).__name__} needs the tensor {missing[0]}{more}, which the checkpoint does not hold under that name"
        )
    for name, entry in stored.items():
        shape = tuple((parameters | persistent)[name].shape)
        if name in transposed:
            shape = shape[::-1]
        if shape != entry.shape:
            raise InputRefused(
                f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, but config.json makes it {list(shape)}"
            )
    used = {entry.name for entry in stored.values()}
    unused = tuple(sorted(set(source.tensors) - used))
    return Skeleton(source, module, stored, ties, unused, transposed)


def load(
    skeleton: Skeleton, prefix: str, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> nn.Module:
    """Fill the parameters of the submodule named ``prefix`` and return it.

    Floating-point parameters are cast to ``dtype``. Tied parameters are filled from what they share.
    """
    module = skeleton.module.get_submodule(prefix)
    for name, _ in list(module.named_parameters(remove_duplicate=False)) + list(module.named_buffers()):
        full = f"{prefix}.{name}" if prefix else name
        full = skeleton.ties.get(full, full)
        if full not in skeleton.stored:
            continue  # a computed buffer: already real
        value = skeleton.read(full).to(device=device)
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


def _dtype(source: Source) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for entry in source.tensors.values():
        if entry.torch_dtype.is_floating_point:
            sizes[entry.torch_dtype] = sizes.get(entry.torch_dtype, 0) + entry.numel
    return max(sizes, key=lambda dtype: sizes[dtype])


def _declared_ties(module: PreTrainedModel, stored: dict[str, TensorEntry]) -> dict[str, str]:
    """Parameters that are not stored, by the stored one that they share. Which of a group is stored varies."""
    groups: dict[str, list[str]] = {}
    for name, shared in (getattr(module, "all_tied_weights_keys", None) or {}).items():
        groups.setdefault(shared, [shared]).append(name)
    ties: dict[str, str] = {}
    for members in groups.values():
        held = [name for name in members if name in stored]
        ties |= {name: held[0] for name in members if held and name not in stored}
    return ties


def _as_linear(module: nn.Module) -> list[str]:
    """Put a Linear in the place of every ``Conv1D``, which is one with its weight transposed; returns their paths."""
    found = [name for name, m in module.named_modules() if isinstance(m, Conv1D)]
    for name in found:
        conv = module.get_submodule(name)
        assert isinstance(conv, Conv1D)
        in_features, out_features = conv.weight.shape
        linear = nn.Linear(in_features, out_features, bias=conv.bias is not None, device="meta")
        module.set_submodule(name, linear.requires_grad_(False))
    return found


def _computed(module: PreTrainedModel, name: str, dtype: torch.dtype) -> bool:
    """Make a parameter that is computed when the model is built and never stored (sinusoidal positions, for
    example) a real buffer, rounded to ``dtype`` as in the loaded model; False if ``name`` is none of those."""
    if not any(
        re.search(pattern, name) for pattern in getattr(module, "_keys_to_ignore_on_save", None) or []
    ):
        return False
    path, _, leaf = name.rpartition(".")
    owner, shape = module.get_submodule(path), module.get_parameter(name).shape
    values = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            owner._parameters[leaf] = nn.Parameter(torch.zeros(shape), requires_grad=False)
            module._init_weights(owner)
            values.append(owner.get_parameter(leaf).detach())
    if not torch.equal(*values):
        return False  # initialised at random, so it is a weight that is missing
    del owner._parameters[leaf]
    owner.register_buffer(leaf, values[0].to(dtype).float(), persistent=False)
    return True


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
