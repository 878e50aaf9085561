"""Everything that can go wrong cheaply, found before a weight is loaded: data, tokenizers, memory."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from compressor.errors import InputRefused, MachineLimit, UsageError
from compressor.evaluation.facts import available_memory, parameter_count
from compressor.evaluation.load import Task, task_of
from compressor.evaluation.targets import Targets, masked_token_targets, next_token_targets
from compressor.sources.model import Source, load_tokenizer, longest_sequence
from compressor.sources.text import Rows, TokenSet, read_rows, tokenize

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """What to evaluate on and how. ``samples`` sequences of ``sequence_length`` tokens; ``packing`` is
    concat, rows or auto; ``device`` may be auto and ``dtype`` too (the baseline's own). ``generations`` sequences of a
    causal language model are also continued."""

    data: str = "builtin:test"
    column: str | None = None
    split: str | None = None
    packing: str = "auto"
    samples: int = 64
    sequence_length: int = 512
    batch_size: int = 4
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    generations: int = 3


@dataclass(frozen=True)
class Preparation:
    """A checked evaluation, ready to run: resolved ``device`` and ``dtype``, the tokens, what it takes.

    ``memory_needed`` is an estimate in bytes on the device: both models' dense weights and one batch of logits.
    """

    baseline: Source | None
    compressed: Source
    settings: Settings
    task: Task
    tokens: TokenSet
    targets: Targets | None
    device: str
    dtype: str
    memory_needed: int
    memory_available: int
    warnings: tuple[str, ...]


def prepare(baseline: Source | None, compressed: Source, settings: Settings) -> Preparation:
    """Run every check that needs no weights, and tokenize the data.

    Raises InputRefused for unusable data, for checkpoints of different kinds or tokenizers and for
    sequences longer than the model's, UsageError for impossible settings, MachineLimit when the
    weights cannot fit in memory.
    """
    task = task_of(compressed.config, compressed.path)
    if baseline is None and task == "embedding":
        raise UsageError(
            f"{compressed.ref}: an encoder is only compared, so give the original with --baseline"
        )
    if baseline is not None and (other := task_of(baseline.config, baseline.path)) != task:
        raise InputRefused(
            f"{compressed.ref} is evaluated as {task} and {baseline.ref} as {other}: not one model"
        )
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, baseline or compressed, device)
    longest = longest_sequence(compressed.config)
    if longest is not None and settings.sequence_length > longest:
        raise UsageError(
            f"--sequence-length {settings.sequence_length}: {compressed.ref} takes at most {longest} tokens"
        )

    rows = read_rows(settings.data, column=settings.column, split=settings.split)
    tokenizer = load_tokenizer(compressed)
    if baseline is not None:
        check_same_tokenizer(load_tokenizer(baseline), tokenizer, baseline.ref, compressed.ref)
    tokens = tokenize(
        rows,
        tokenizer,
        samples=settings.samples,
        sequence_length=settings.sequence_length,
        packing=_packing(settings.packing, rows, task),
        pick="first",
        seed=settings.seed,
    )
    text_config = compressed.config.get("text_config") or compressed.config
    needed = _memory_needed(baseline, compressed, settings, dtype, text_config.get("vocab_size", 0))
    available = available_memory(device)
    weights = needed["weights"]
    if weights > available:
        models = "both models need" if baseline is not None else "the model needs"
        raise MachineLimit(
            f"{models} {weights / 1e9:.1f} GB in {dtype} and {device} has {available / 1e9:.1f} GB free: "
            "use a smaller --dtype or another --device"
        )
    warnings = list(tokens.report.warnings)
    if weights + needed["logits"] > available:
        warnings.append(
            f"about {(weights + needed['logits']) / 1e9:.1f} GB needed and {available / 1e9:.1f} GB free on {device}: "
            "lower --batch-size"
        )
    return Preparation(
        baseline=baseline,
        compressed=compressed,
        settings=settings,
        task=task,
        tokens=tokens,
        targets=_targets(task, tokens, tokenizer, settings.seed),
        device=device,
        dtype=dtype,
        memory_needed=weights + needed["logits"],
        memory_available=available,
        warnings=tuple(warnings),
    )


def _packing(asked: str, rows: Rows, task: Task) -> Literal["auto", "concat", "rows"]:
    """Encoders read items one by one; running text is cut into windows for every model."""
    match asked:
        case "concat" | "rows":
            return asked
        case "auto":
            return "rows" if task != "causal-lm" and not rows.document else "auto"
    raise UsageError(f"packing {asked}: choose auto, concat or rows")


def resolve_device(name: str) -> str:
    """``auto`` becomes the best device there is. Raises UsageError for one that is not here."""
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise UsageError(f"--device {name}: no such device here") from None
    return name


def resolve_dtype(name: str, source: Source, device: str = "cuda") -> str:
    """``auto`` becomes the dtype in the config, or else that of most of the stored weights.

    On a CPU it becomes float32: most have no half-precision units, so that half precision is slower there,
    and its rounding would add to the differences that are being measured.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UsageError(f"--dtype {name}: choose auto, {', '.join(DTYPES)}")
        return name
    if device == "cpu":
        return "float32"
    config = source.config.get("text_config") or source.config
    stated = config.get("dtype") or config.get("torch_dtype") or source.config.get("dtype")
    if isinstance(stated, str) and stated.removeprefix("torch.") in DTYPES:
        return stated.removeprefix("torch.")
    sizes = dict.fromkeys(DTYPES, 0)
    for entry in source.tensors.values():
        dtype = str(entry.torch_dtype).removeprefix("torch.")
        if dtype in sizes:
            sizes[dtype] += entry.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def check_same_tokenizer(baseline: Any, compressed: Any, baseline_ref: str, compressed_ref: str) -> None:
    """Refuse tokenizers under which the two models would not see the same tokens.

    Vocabulary, special tokens and the ids of a probe text must be equal.
    """
    first, second = baseline.get_vocab(), compressed.get_vocab()
    if first != second:
        differing = sorted(set(first.items()) ^ set(second.items()))
        raise InputRefused(
            f"{compressed_ref}: its tokenizer is not {baseline_ref}'s: {len(differing)} vocabulary entries differ, "
            f"first {differing[0][0]!r}: give the checkpoint it was made from"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id"):
        ours, theirs = getattr(compressed, name, None), getattr(baseline, name, None)
        if ours != theirs:
            raise InputRefused(
                f"{compressed_ref}: {name} is {ours} and {theirs} in {baseline_ref}: copy its tokenizer"
            )
    if baseline(_PROBE)["input_ids"] != compressed(_PROBE)["input_ids"]:
        raise InputRefused(
            f"{compressed_ref}: its tokenizer splits text differently from {baseline_ref}'s: copy that one"
        )


_PROBE = "The quick brown fox's 12,345 über-ångström naïveté;\n\n    def f(x):\treturn x ** 2  # 日本語 🙂"


def _targets(task: Task, tokens: TokenSet, tokenizer: Any, seed: int) -> Targets | None:
    match task:
        case "causal-lm":
            return next_token_targets(tokens)
        case "masked-lm":
            if tokenizer.mask_token_id is None:
                raise InputRefused(
                    "the tokenizer has no mask token, which a masked language model is evaluated with"
                )
            special = frozenset(tokenizer.all_special_ids)
            return masked_token_targets(
                tokens, mask_token_id=tokenizer.mask_token_id, special_ids=special, seed=seed
            )
        case "embedding":
            return None


def _memory_needed(
    baseline: Source | None, compressed: Source, settings: Settings, dtype: str, vocabulary: int
) -> dict[str, int]:
    item = getattr(torch, dtype).itemsize
    sources = [source for source in (baseline, compressed) if source is not None]
    weights = sum(parameter_count(source.tensors) * item for source in sources)
    # Logits in the model's dtype, and once more for models that convert or scale them.
    logits = 2 * len(sources) * settings.batch_size * settings.sequence_length * vocabulary * item
    return {"weights": weights, "logits": logits}
