"""What a quantization is going to do: every check that can be made before the first forward pass."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compressor.checkpoint.coverage import coverage
from compressor.checkpoint.serve import engine_interpreter
from compressor.checkpoint.sidecar import CoverageFacts
from compressor.engines import check as check_engine
from compressor.engines import check_fp8_cache
from compressor.errors import InputRefused, MachineLimit, UsageError, VerificationFailed
from compressor.formats import Format, parse_format
from compressor.graph import ModelGraph, Skeleton, build_skeleton, discover
from compressor.graph.assign import uniform_plan
from compressor.graph.attention import attention_layers, latent
from compressor.graph.inputs import reads_speech
from compressor.planning.check import check_plan
from compressor.plans import Plan, read_plan
from compressor.recipes import QuantizeRecipe, Recipe
from compressor.sources.model import Source, load_tokenizer, open_model
from compressor.sources.text import Rows, TokenSet, read_rows, tokenize


@dataclass(frozen=True)
class Job:
    """Everything that is known before the first block is read. ``tokens`` is None where nothing is calibrated."""

    source: Source
    skeleton: Skeleton
    graph: ModelGraph
    plan: Plan
    tokens: TokenSet | None
    device: torch.device
    compute_dtype: torch.dtype
    coverage: CoverageFacts
    warnings: tuple[str, ...]

    def format_of(self, name: str) -> Format:
        return parse_format(self.plan.layers[name].format)


def open_recipe_model(recipe: Recipe) -> Source:
    """The model of ``recipe``, opened as it says."""
    return open_model(
        recipe.model,
        revision=recipe.revision,
        trust_remote_code=recipe.trust_remote_code,
        allow_pickle=recipe.allow_pickle,
    )


def prepare(recipe: Recipe) -> Job:
    """Every check that needs no forward pass; reads no weights beyond their headers.

    Raises InputRefused, UsageError or MachineLimit, each naming what is at fault.
    """
    settings = recipe.quantize
    if recipe.verify.engine == "vllm":
        engine_interpreter(recipe.verify.engine_python)
    rows: Rows | None = None
    if settings.method != "rtn" or settings.kv_cache is not None:
        data = settings.calibration
        rows = read_rows(data.data, column=data.column, split=data.split)
    source = open_recipe_model(recipe)
    skeleton = build_skeleton(source)
    graph = discover(skeleton)
    if settings.method != "rtn" and reads_speech(skeleton.module):
        raise InputRefused(
            f"{source.path}: {type(skeleton.module).__name__} reads speech, and calibration has text only: pass --method rtn"
        )
    if settings.plan is not None:
        plan = check_plan(settings.plan, read_plan(settings.plan), graph, settings.engine)
    else:
        plan = uniform_plan(
            skeleton,
            graph,
            parse_format(settings.scheme),
            ignore=settings.ignore,
            include=settings.include,
            strict=settings.strict,
        )
    if not plan.quantized() and settings.kv_cache is None:
        raise UsageError(
            f"{recipe.model}: the plan quantizes no layer: change the scheme, the plan or --ignore"
        )
    _check_engine(settings, graph, plan)
    _check_forms(recipe, skeleton, graph, plan)
    if settings.kv_cache is not None:
        _check_cache(settings, skeleton, graph)

    covered = coverage(skeleton, graph, plan.quantized(), {n: a.reason for n, a in plan.kept().items()})
    if covered.ratio < settings.min_coverage:
        left = next(iter(covered.uncovered.items()), ("nothing", ""))
        raise VerificationFailed(
            f"{recipe.model}: only {100 * covered.ratio:.1f} % of the eligible parameters would be quantized, and "
            f"min_coverage is {100 * settings.min_coverage:g} %: first left out is {left[0]} ({left[1]})"
        )

    warnings = _fallbacks(plan)
    if gap := transformers_gap(skeleton, graph, plan):
        warnings.append(f"{gap}: compressor itself loads the checkpoint, transformers alone does not")
    tokens = None
    if rows is not None:
        tokens = tokenize(
            rows,
            load_tokenizer(source),
            samples=settings.calibration.samples,
            sequence_length=settings.calibration.sequence_length,
            packing=settings.calibration.packing,
            pick="spread",
            seed=recipe.seed,
        )
        warnings += tokens.report.warnings
        if graph.towers:
            warnings.append(
                f"calibrated on text alone: what {', '.join(graph.towers)} give the language model for images or sound was not seen"
            )
        _check_length(skeleton, tokens)
    device = choose_device(recipe.device)
    # Half precision is slow on CPUs without matrix units and adds error everywhere: use it on GPUs only.
    compute_dtype = torch.float32 if device.type == "cpu" else skeleton.dtype
    return Job(source, skeleton, graph, plan, tokens, device, compute_dtype, covered, tuple(warnings))


def estimated_disk_bytes(job: Job) -> int:
    """Bytes on disk at the peak: the block files and the final shards exist side by side for a moment."""
    replaced = {f"{name}.weight": a for name, a in job.plan.quantized().items()}
    blocks = sum(a.bytes or 0 for a in replaced.values())
    rest = sum(e.nbytes for n, e in job.skeleton.stored.items() if n not in replaced)
    rest += sum(job.source.tensors[name].nbytes for name in job.skeleton.unused)
    others = sum(
        f.stat().st_size for f in job.source.path.iterdir() if f.suffix == ".json" or f.suffix == ".model"
    )
    return 2 * blocks + rest + others + 2**20


def _check_engine(settings: QuantizeRecipe, graph: ModelGraph, plan: Plan) -> None:
    if settings.engine is None:
        return
    problems = []
    layers = {layer.name: layer for layer in graph.layers}
    for name, assignment in plan.quantized().items():
        if name in layers:
            problems += check_engine(settings.engine, [layers[name]], parse_format(assignment.format))
    if problems:
        first = problems[0]
        offer = f"; use {first.nearest}" if first.nearest else ""
        raise InputRefused(
            f"{settings.engine} cannot load {len(problems)} of the planned layers, first {first.layer}: {first.reason}{offer}"
        )


def _check_cache(settings: QuantizeRecipe, skeleton: Skeleton, graph: ModelGraph) -> None:
    """Refuse --kv-cache where there is no cache, or none of keys and values by themselves."""
    kind = type(skeleton.module).__name__
    inside = tuple(f"{block}." for block in graph.blocks)
    layers = {n: m for n, m in attention_layers(skeleton.module).items() if n.startswith(inside)}
    if skeleton.config.is_encoder_decoder or not kind.endswith(("ForCausalLM", "LMHeadModel")):
        raise InputRefused(
            f"{skeleton.source.path}: --kv-cache is for decoders that generate text, and this is {kind}: leave it out"
        )
    if not layers:
        raise InputRefused(
            f"{skeleton.source.path}: {kind} has no attention layer that caches keys and values: leave --kv-cache out"
        )
    for name, layer in layers.items():
        if latent(layer):
            raise InputRefused(
                f"{name}: it caches a latent that keys and values are made from (MLA), which scales of keys and values "
                "do not describe: leave --kv-cache out"
            )
    if settings.engine is not None:
        problem = check_fp8_cache(settings.engine, [(n, _head_size(skeleton, m)) for n, m in layers.items()])
        if problem is not None:
            raise InputRefused(f"{settings.engine}: {problem.layer}: {problem.reason}: leave --kv-cache out")


def _head_size(skeleton: Skeleton, layer: nn.Module) -> int:
    config = skeleton.config.get_text_config()
    own = next((getattr(layer, a) for a in ("head_dim", "head_size") if hasattr(layer, a)), None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _check_forms(recipe: Recipe, skeleton: Skeleton, graph: ModelGraph, plan: Plan) -> None:
    """Refuse what could not be verified: formats that no engine loads for a layer's form, experts in several."""
    if recipe.quantize.engine == "transformers" and (gap := transformers_gap(skeleton, graph, plan)):
        raise InputRefused(f"transformers cannot load the planned checkpoint: {gap}")
    formats: dict[str, str] = {}
    for layer in graph.layers:
        fmt = parse_format(plan.layers[layer.name].format)
        if layer.form == "linear":
            continue
        if fmt.activations is not None:
            what = "a Conv1D" if layer.form == "conv1d" else "one of a layer's experts"
            raise InputRefused(
                f"{layer.name}: it is {what}, which engines load with quantized weights only, and {fmt} quantizes inputs: use "
                "w8 or w4g128"
            )
        rows = layer.in_features * skeleton.dtype.itemsize, layer.in_features * 4
        if layer.form == "expert" and any(size % 16 for size in rows):
            raise InputRefused(
                f"{layer.name}: transformers runs experts only if 16 divides the bytes of a row, and it has {layer.in_features} inputs"
            )
        if layer.form == "expert" and fmt.quantized and recipe.verify.engine is not None:
            formats.setdefault(fmt.name, layer.name)
    if len(formats) > 1:
        (first, one), (second, other), *_ = formats.items()
        raise InputRefused(
            f"{one} is planned as {first} and {other} as {second}, but transformers loads the experts of a model in one format: "
            f"plan them alike, for example with --pin '*.experts=w4g32'"
        )


# Their _init_weights touches out_proj.weight after loading, which a packed layer does not have (transformers 5.24).
_MAMBA = {"mamba", "mamba2", "falcon_mamba"}


def transformers_gap(skeleton: Skeleton, graph: ModelGraph, plan: Plan) -> str | None:
    """Why transformers alone does not load the planned checkpoint; None if it does.

    compressor fills these gaps when it loads a checkpoint itself (``evaluation.transformers_gaps``).
    """
    quantized = {name: parse_format(a.format) for name, a in plan.quantized().items()}
    if any(layer.form == "conv1d" and layer.name in quantized for layer in graph.layers):
        return "compressed-tensors in transformers knows Linear only, and GPT-2's layers are Conv1D"
    if any(layer.form == "expert" and layer.name not in quantized for layer in graph.layers):
        return (
            "transformers loads experts only if they are quantized like the rest, and some stay as they are"
        )
    packed = any(fmt.activations is None and name.endswith(".out_proj") for name, fmt in quantized.items())
    if skeleton.config.model_type in _MAMBA and packed:
        return "transformers initialises out_proj of Mamba again, which fails on packed weights"
    return None


def _check_length(skeleton: Skeleton, tokens: TokenSet) -> None:
    limit = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
    length = tokens.input_ids.shape[1]
    if limit is not None and length > limit:
        raise UsageError(
            f"calibration.sequence_length {length} is longer than the model's max_position_embeddings {limit}"
        )


def _fallbacks(plan: Plan) -> list[str]:
    """One line for each kind of layer whose format is not the one that was asked for."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, assignment in plan.layers.items():
        if assignment.reason and (parse_format(assignment.format).quantized or "divide" in assignment.reason):
            alike.setdefault((assignment.reason, assignment.format), []).append(name)
    return [
        f"{reason}: {len(names)} such layers get {fmt} (first {names[0]})"
        for (reason, fmt), names in alike.items()
    ]


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise UsageError when ``target`` is taken and may not be replaced."""
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: already exists: choose another output or pass --overwrite")


def choose_device(name: str) -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU. Raises UsageError or MachineLimit."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MachineLimit(
            f"--device {name}: this machine shows torch {torch.cuda.device_count()} CUDA devices"
        )
    return device
