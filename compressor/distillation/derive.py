"""A smaller student out of the teacher: whole layers, FFN neurons and groups of heads are left out.

What is left out is what a calibration forward says matters least. The result is an ordinary checkpoint of the
same architecture with a smaller config, every layer alike, which transformers and vLLM load unchanged.

Scores: block influence 1 − cos(layer input, layer output) (ShortGPT, Men et al. 2024, arXiv 2403.03853) or the
KL that leaving the layer out costs; mean |activation| of FFN neurons and mean norm of a KV group's head
outputs (Minitron, Muralidharan et al. 2024, arXiv 2407.14679). Sizes are multiples of 64 where they can be.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressor.distillation.losses import forward_kl, softened
from compressor.distillation.tasks import Batch, TaskName, logit_rows
from compressor.errors import InputRefused, UsageError
from compressor.graph.units import towers_of

Axis = Literal["depth", "ffn", "heads"]
AXES: tuple[Axis, ...] = ("depth", "ffn", "heads")
DepthScore = Literal["influence", "kl"]

# The config key that counts a stack's layers, by the stack's place in the model. The first that exists counts.
_ENCODER_DEPTH = ("encoder_layers", "num_layers")
_DECODER_DEPTH = ("decoder_layers", "num_decoder_layers")
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FFN_SIZE = ("intermediate_size", "n_inner", "hidden_dim", "d_ff", "ffn_dim")
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "attention_layers")
# (into the FFN, out of it) by last name components; the first of the inputs are gated together
_FFN = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("lin1",), "lin2"),
    (("intermediate.dense",), "output.dense"),
    (("up_proj",), "down_proj"),
)


@dataclass(frozen=True)
class Request:
    """What was asked for: ``layers`` to keep in each stack (encoder, decoder where there are two), or a
    share of the ``parameters``."""

    layers: tuple[int, ...] = ()
    parameters: float | None = None
    axes: tuple[Axis, ...] = ("depth", "ffn")
    score: DepthScore = "influence"


def parse_request(text: str) -> Request:
    """Read ``layers=6``, ``layers=12+3`` (encoder + decoder), ``params=50%``, with ``axes=depth+ffn+heads`` and
    ``score=influence|kl``, comma-separated. Raises UsageError naming the part at fault."""
    given: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in ("layers", "params", "axes", "score") or not value:
            raise UsageError(
                f"--student derive:{text}: {part!r} is none of layers=N, params=P%, axes=depth+ffn+heads, score=influence|kl"
            )
        given[key] = value
    if ("layers" in given) == ("params" in given):
        raise UsageError(f"--student derive:{text}: give layers=N or params=P%")
    score = given.get("score", "influence")
    if score not in ("influence", "kl"):
        raise UsageError(f"--student derive:{text}: score is influence or kl")
    if "layers" in given:
        if "axes" in given:
            raise UsageError(f"--student derive:{text}: axes go with params=P%")
        counts = given["layers"].split("+")
        if not all(c.isdigit() and int(c) for c in counts) or len(counts) > 2:
            raise UsageError(f"--student derive:{text}: layers is a number, or two: encoder+decoder")
        return Request(layers=tuple(map(int, counts)), score=score)  # type: ignore[arg-type]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", given["params"])
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share < 1:
        raise UsageError(f"--student derive:{text}: params is a percentage below 100, such as params=50%")
    axes = tuple(given.get("axes", "depth+ffn").split("+"))
    if not set(axes) <= set(AXES):
        raise UsageError(f"--student derive:{text}: axes are {', '.join(AXES)}")
    return Request(parameters=share, axes=axes, score=score)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Stack:
    """A stack of layers that are alike: its module list, and the config key that counts it."""

    path: str
    key: str
    layers: int


@dataclass(frozen=True)
class Derived:
    """What was kept. ``layers`` [stack] → indices of the teacher's layers; sizes of the new config; scores."""

    layers: dict[str, list[int]]
    sizes: dict[str, int]
    parameters: int
    teacher_parameters: int
    scores: dict[str, list[float]] = field(default_factory=dict)
    kl: float | None = None


def stacks_of(model: Any) -> list[Stack]:
    """The model's stacks that text passes through: one, or an encoder's and a decoder's."""
    towers = tuple(f"{path}." for path in towers_of(model))
    config = model.config.get_text_config() if not model.config.is_encoder_decoder else model.config
    found: list[Stack] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or path.startswith(towers):
            continue
        if len({type(layer) for layer in module}) != 1 or any(s.path in path for s in found):
            continue
        keys: tuple[str, ...] = _DEPTH
        if model.config.is_encoder_decoder:
            keys = _DECODER_DEPTH if "decoder" in path else _ENCODER_DEPTH
        key = next((k for k in keys if getattr(config, k, None) == len(module)), None)
        if key is not None:
            found.append(Stack(path, key, len(module)))
    if not found:
        raise InputRefused(
            f"{type(model).__name__}: no stack of layers that its config counts, so no student can be derived from it"
        )
    return found


# ---- what matters


@dataclass
class Importance:
    """``influence`` [stack][layer]; ``neurons`` and ``groups`` [layer module path] → a score each, fp64."""

    influence: dict[str, list[float]]
    neurons: dict[str, Tensor]
    groups: dict[str, Tensor]


@torch.inference_mode()
def measure_importance(model: Any, batches: Sequence[Batch]) -> Importance:
    """One forward pass over ``batches`` with hooks on every layer, FFN and attention output; padding is left out."""
    stacks = stacks_of(model)
    sums: dict[str, list[float]] = {stack.path: [0.0] * stack.layers for stack in stacks}
    neurons: dict[str, Tensor] = {}
    groups: dict[str, Tensor] = {}
    tokens = dict.fromkeys(sums, 0)
    mask: dict[str, Tensor | None] = {}
    handles = []

    def real(path: str, x: Tensor) -> Tensor:
        kept = mask["decoder" if model.config.is_encoder_decoder and "decoder" in path else "encoder"]
        if kept is None or kept.shape != x.shape[:2]:
            return x.reshape(-1, x.shape[-1])
        return x[kept]

    def at_layer(path: str, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            a, b = real(path, before).float(), real(path, after).float()
            sums[path][index] += float((1 - F.cosine_similarity(a, b, dim=-1)).double().sum())
            if index == 0:
                tokens[path] += len(a)

        return hook

    def into(store: dict[str, Tensor], name: str, per_group: int | None) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = real(name, args[0]).float()
            values = x.abs() if per_group is None else x.reshape(len(x), -1, per_group).norm(dim=-1)
            score = values.double().sum(0)
            store[name] = store.get(name, 0) + score

        return hook

    for stack in stacks:
        for index, layer in enumerate(model.get_submodule(stack.path)):
            name = f"{stack.path}.{index}"
            handles.append(layer.register_forward_hook(at_layer(stack.path, index), with_kwargs=True))
            ffn = _ffn_of(layer)
            if ffn is not None:
                out = layer.get_submodule(ffn[1])
                handles.append(out.register_forward_pre_hook(into(neurons, name, None)))
            heads = _heads_of(model, layer)
            if heads is not None:
                width = heads.head_dim * heads.per_group
                out = layer.get_submodule(heads.output)
                handles.append(out.register_forward_pre_hook(into(groups, name, width)))
    try:
        for batch in batches:
            given = batch.inputs.get("attention_mask")
            mask["encoder"] = None if given is None else given.bool()
            mask["decoder"] = batch.where  # of targets, what is padding is what is not supervised
            model(**batch.inputs)
    finally:
        for handle in handles:
            handle.remove()
    influence = {path: [s / max(tokens[path], 1) for s in values] for path, values in sums.items()}
    return Importance(influence, neurons, groups)


@torch.inference_mode()
def layer_kl(model: Any, task: TaskName, batches: Sequence[Batch], stack: Stack) -> list[float]:
    """KL(whole ‖ without the layer), mean over rows, for each layer of ``stack``; one forward pass a layer."""
    whole = [_log_probs(model, task, batch) for batch in batches]
    rows = sum(len(p) for p in whole)
    owner, _, leaf = stack.path.rpartition(".")
    layers = model.get_submodule(stack.path)
    scores = []
    for left_out in range(stack.layers):
        kept = nn.ModuleList([layer for i, layer in enumerate(layers) if i != left_out])
        setattr(model.get_submodule(owner), leaf, kept)
        _set_depth(model, stack.key, stack.layers - 1)
        try:
            total = sum(
                float(forward_kl(_log_probs(model, task, batch), p).double().sum())
                for batch, p in zip(batches, whole, strict=True)
            )
        finally:
            setattr(model.get_submodule(owner), leaf, layers)
            _set_depth(model, stack.key, stack.layers)
        scores.append(total / rows)
    return scores


def _set_depth(model: Any, key: str, layers: int) -> None:
    # Models loop over layers[: config.num_hidden_layers]; nested modules share the config object.
    config = model.config if hasattr(model.config, key) else model.config.get_text_config()
    setattr(config, key, layers)


def _log_probs(model: Any, task: TaskName, batch: Batch) -> Tensor:
    logits = logit_rows(task, model(**batch.inputs), batch)
    if task in ("multi-label", "regression"):
        logits = torch.stack([logits, torch.zeros_like(logits)], -1).flatten(0, 1)
    return softened(logits, 1.0)


# ---- what is kept


def kept_layers(scores: Sequence[float], keep: int) -> list[int]:
    """The ``keep`` most important layers in order; the first and the last always stay."""
    last = len(scores) - 1
    if not 1 <= keep <= len(scores):
        raise UsageError(f"--student derive:layers={keep}: the teacher has {len(scores)} layers")
    if keep == 1:
        return [0]
    inner = sorted(range(1, last), key=lambda i: -scores[i])[: keep - 2]
    return sorted([0, *inner, last])


def derive(
    model: Any,
    request: Request,
    batches: Sequence[Batch],
    task: TaskName,
) -> tuple[Any, Derived]:
    """A student by ``request`` and what was kept in it; ``model`` keeps its weights, but no key-value cache.

    With a share of the parameters, several combinations of depth and width that meet it are built and the
    one with the least KL to the teacher on ``batches`` is taken.
    Raises UsageError for a request that the architecture cannot meet.
    """
    # Layers number their key-value cache; without one, any of them can be left out.
    model.config.use_cache = model.config.get_text_config().use_cache = False
    importance = measure_importance(model, batches)
    stacks = stacks_of(model)
    scores = dict(importance.influence)
    if request.score == "kl":
        scores = {stack.path: layer_kl(model, task, batches, stack) for stack in stacks}
    total = _count(model)
    if request.layers:
        wanted = request.layers if len(request.layers) == len(stacks) else (request.layers[0],) * len(stacks)
        if len(request.layers) == 2 and len(stacks) == 1:
            raise UsageError("--student derive:layers=N+M is for encoder-decoders: this model has one stack")
        if len(stacks) == 2 and len(request.layers) == 1:
            # The encoder runs once, the decoder once a token: the decoder is what is cut (DistilBART, Distil-Whisper).
            wanted = tuple(s.layers if "decoder" not in s.path else request.layers[0] for s in stacks)
        layers = {s.path: kept_layers(scores[s.path], n) for s, n in zip(stacks, wanted, strict=True)}
        student = build(model, layers, importance, 1.0, 1.0)
        derived = Derived(layers, {}, _count(student), total, scores, _kl(model, student, task, batches))
        return student, derived
    assert request.parameters is not None
    best: tuple[float, Any, Derived] | None = None
    reached: list[float] = []
    for layers in _depths(stacks, scores, request):
        found = _width_for(model, layers, importance, request, total)
        if found is None:
            continue
        student, sizes = found
        count = _count(student)
        reached.append(count / total)
        if not -0.05 <= count / total - request.parameters <= 0.02:
            continue
        kl = _kl(model, student, task, batches)
        derived = Derived(layers, sizes, count, total, scores, kl)
        if best is None or kl < best[0]:
            best = (kl, student, derived)
    if best is None:
        near = min(reached, key=lambda r: abs(r - request.parameters), default=1.0)  # type: ignore[operator]
        raise UsageError(
            f"--student derive:params={request.parameters:.0%}: with axes {'+'.join(request.axes)} the nearest is {near:.0%} "
            "(embeddings stay whole)"
        )
    return best[1], best[2]


def _depths(
    stacks: list[Stack], scores: dict[str, list[float]], request: Request
) -> list[dict[str, list[int]]]:
    """Depths to try: all of them for shallow models, at most a dozen for deep ones."""
    if "depth" not in request.axes:
        return [{s.path: list(range(s.layers)) for s in stacks}]
    shares = sorted({round(s.layers * part / 12) / s.layers for s in stacks[:1] for part in range(2, 13)})
    return [
        {s.path: kept_layers(scores[s.path], max(1, round(s.layers * share))) for s in stacks}
        for share in shares
        if share > 0
    ]


def _width_for(
    model: Any, layers: dict[str, list[int]], importance: Importance, request: Request, total: int
) -> tuple[Any, dict[str, int]] | None:
    """The widest student with these layers that keeps to the request, by bisection over the width."""
    assert request.parameters is not None
    target = request.parameters * total

    def built(share: float) -> Any:
        ffn = share if "ffn" in request.axes else 1.0
        heads = share if "heads" in request.axes else 1.0
        return build(model, layers, importance, ffn, heads)

    whole = built(1.0)
    if abs(_count(whole) - target) <= 0.02 * total or set(request.axes) == {"depth"}:
        return whole, _sizes(whole)
    if _count(whole) < target:
        return None
    low, high = 0.05, 1.0
    for _ in range(7):
        middle = (low + high) / 2
        if _count(built(middle)) > target:
            high = middle
        else:
            low = middle
    student = built(low)
    return student, _sizes(student)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _sizes(model: Any) -> dict[str, int]:
    config = model.config.get_text_config()
    keys = (
        *_DEPTH,
        *_FFN_SIZE,
        "num_attention_heads",
        "num_key_value_heads",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
    )
    return {k: v for k in keys if isinstance(v := getattr(config, k, None), int)}


@torch.inference_mode()
def _kl(teacher: Any, student: Any, task: TaskName, batches: Sequence[Batch]) -> float:
    total, rows = 0.0, 0
    for batch in batches:
        p = _log_probs(teacher, task, batch)
        total += float(forward_kl(_log_probs(student, task, batch), p).double().sum())
        rows += len(p)
    return total / max(rows, 1)


# ---- surgery


@dataclass(frozen=True)
class _Heads:
    """An attention's shape: ``inputs`` are the q, k, v projections, ``output`` what follows the heads."""

    inputs: tuple[str, str, str]
    output: str
    head_dim: int
    per_group: int
    groups: int


def _ffn_of(layer: nn.Module) -> tuple[tuple[str, ...], str] | None:
    names = {
        name: m
        for name, m in layer.named_modules()
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    }
    for inputs, output in _FFN:
        for out in names:
            if out == output or out.endswith(f".{output}"):
                prefix = out.removesuffix(output)
                paths = tuple(f"{prefix}{name}" for name in inputs)
                if all(p in names for p in paths) and "attention" not in prefix:
                    return paths, out
    return None


def _heads_of(model: Any, layer: nn.Module) -> _Heads | None:
    """Attention whose heads can be left out: the config must state head_dim apart from the hidden size."""
    config = model.config.get_text_config()
    heads, head_dim = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not heads or not head_dim or model.config.is_encoder_decoder:
        return None
    for prefix in ("self_attn.", "attention."):
        inputs = tuple(f"{prefix}{n}" for n in ("q_proj", "k_proj", "v_proj"))
        output = f"{prefix}o_proj"
        modules = dict(layer.named_modules())
        if all(name in modules for name in (*inputs, output)):
            return _Heads(inputs, output, head_dim, heads // groups, groups)  # type: ignore[arg-type]
    return None


def build(model: Any, layers: dict[str, list[int]], importance: Importance, ffn: float, heads: float) -> Any:
    """A new model of the kept ``layers`` with the given shares of FFN neurons and KV groups in each."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config() if not config.is_encoder_decoder else config
    state = dict(model.state_dict())
    for stack in stacks_of(model):
        state = _renumbered(state, stack.path, layers[stack.path])
        setattr(text, stack.key, len(layers[stack.path]))
        # BART's config has its encoder's depth under two names.
        if (
            config.is_encoder_decoder
            and stack.key == "encoder_layers"
            and "num_hidden_layers" in text.__dict__
        ):
            text.num_hidden_layers = len(layers[stack.path])
        for key in _PER_LAYER:
            values = getattr(text, key, None)
            if isinstance(values, list) and len(values) == stack.layers:
                setattr(text, key, [values[i] for i in layers[stack.path]])
    if getattr(text, "max_window_layers", None) is not None:
        (only,) = list(layers.values())[:1]
        text.max_window_layers = sum(i < text.max_window_layers for i in only)
    if ffn < 1:
        _cut_ffn(model, text, state, layers, importance, ffn)
    if heads < 1:
        _cut_heads(model, text, state, layers, importance, heads)
    student = type(model)._from_config(config, dtype=next(model.parameters()).dtype)
    missing, unexpected = student.load_state_dict(state, strict=False)
    tied = set(getattr(student, "_tied_weights_keys", None) or ())
    missing = [m for m in missing if m not in tied]
    if missing or unexpected:
        raise InputRefused(
            f"{type(model).__name__}: cannot be derived from: {(missing or unexpected)[0]} does not fit the smaller model"
        )
    student.tie_weights()
    student.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return student.to(next(model.parameters()).device).eval()


def _renumbered(state: dict[str, Tensor], path: str, kept: list[int]) -> dict[str, Tensor]:
    new_index = {old: new for new, old in enumerate(kept)}
    result = {}
    for name, value in state.items():
        if name.startswith(f"{path}."):
            index, _, rest = name.removeprefix(f"{path}.").partition(".")
            if int(index) not in new_index:
                continue
            name = f"{path}.{new_index[int(index)]}.{rest}"
        result[name] = value
    return result


def _rounded(size: float, whole: int) -> int:
    """To a multiple of 64 where the whole is one (kernels like it), else of 8, else of 1."""
    step = next(s for s in (64, 8, 1) if whole % s == 0 and whole >= 4 * s)
    return min(whole, max(step, round(size / step) * step))


def _cut_ffn(
    model: Any, config: Any, state: dict[str, Tensor], layers: dict[str, list[int]], importance: Importance, share: float
) -> None:  # fmt: skip
    for stack in stacks_of(model):
        whole = size = 0
        for new, old in enumerate(layers[stack.path]):
            layer = model.get_submodule(f"{stack.path}.{old}")
            ffn = _ffn_of(layer)
            scores = importance.neurons.get(f"{stack.path}.{old}")
            if ffn is None or scores is None:
                raise UsageError(
                    f"{type(model).__name__}: its FFN is not one that can be cut: leave out axis ffn"
                )
            whole = len(scores)
            size = _rounded(share * whole, whole)
            kept = scores.topk(size).indices.sort().values.to(next(model.parameters()).device)
            _take(state, layer, f"{stack.path}.{new}", ffn[0], ffn[1], kept)
        keys = (*_FFN_SIZE, "encoder_ffn_dim" if "decoder" not in stack.path else "decoder_ffn_dim")
        for key in keys:
            if getattr(config, key, None) == whole:
                setattr(config, key, size)
        if getattr(config, "n_inner", 0) is None:
            config.n_inner = size


def _cut_heads(
    model: Any, config: Any, state: dict[str, Tensor], layers: dict[str, list[int]], importance: Importance, share: float
) -> None:  # fmt: skip
    for stack in stacks_of(model):
        for new, old in enumerate(layers[stack.path]):
            layer = model.get_submodule(f"{stack.path}.{old}")
            heads = _heads_of(model, layer)
            if heads is None:
                raise UsageError(
                    f"{type(model).__name__}: its config ties heads to the hidden size: leave out axis heads"
                )
            groups = max(1, round(share * heads.groups))
            kept = importance.groups[f"{stack.path}.{old}"].topk(groups).indices.sort().values
            channel = torch.arange(heads.head_dim)
            small = (kept[:, None].cpu() * heads.head_dim + channel).flatten()
            wide = heads.head_dim * heads.per_group
            queries = (kept[:, None].cpu() * wide + torch.arange(wide)).flatten()
            place = f"{stack.path}.{new}"
            device = next(model.parameters()).device
            q, k, v = heads.inputs
            _take(state, layer, place, (q,), heads.output, queries.to(device))
            _take(state, layer, place, (k, v), None, small.to(device))
            config.num_key_value_heads = groups
            config.num_attention_heads = groups * heads.per_group


def _take(
    state: dict[str, Tensor], layer: nn.Module, place: str, inputs: tuple[str, ...], output: str | None, kept: Tensor
) -> None:  # fmt: skip
    """Keep some outputs of the ``inputs`` layers and the same inputs of ``output`` (Conv1D stores [in, out])."""
    for name in inputs:
        rows = 1 if type(layer.get_submodule(name)).__name__ == "Conv1D" else 0
        state[f"{place}.{name}.weight"] = state[f"{place}.{name}.weight"].index_select(rows, kept)
        if f"{place}.{name}.bias" in state:
            state[f"{place}.{name}.bias"] = state[f"{place}.{name}.bias"].index_select(0, kept)
    if output is not None:
        columns = 0 if type(layer.get_submodule(output)).__name__ == "Conv1D" else 1
        state[f"{place}.{output}.weight"] = state[f"{place}.{output}.weight"].index_select(columns, kept)
