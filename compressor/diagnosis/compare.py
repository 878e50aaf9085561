"""Run both models block by block on the same tokens, and take the error of every layer apart.

For a layer f of the original and f̂ of the checkpoint, with inputs x and x̂ of each in its own model and Q what the
engine does to inputs before the product (nothing, for formats that quantize weights only):

    whole error        f̂(Q x̂) − f(x)
    weights alone      f̂(x) − f(x)        what rounding the weights does to the original inputs
    activations alone  f(Q x) − f(x)       what quantizing the inputs does to the original layer
    inherited          f(x̂) − f(x)         what the original layer makes of the errors made before it

They need not add up: the first two are made here, the third was made before. Blocks are held one at a time; their
inputs stay in files, and what was found in each is journalled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compressor.calibration.stream import Stream, loaded_ends, open_stream, run, tail
from compressor.console import steps
from compressor.diagnosis.job import DiagnoseJob, load_compressed
from compressor.formats import DENSE, Format, fake_quantize_activations, parse_format
from compressor.graph import load, unload
from compressor.sensitivity.journal import Journal
from compressor.sensitivity.measured import sequence_kl
from compressor.sensitivity.probes import scored_positions

_PARTS = 8  # batches, so that some can be held out

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Place:
    """One unit, norm or outside layer and what was found at it: sums over its layers and tokens of squares (fp64)
    unless said otherwise. ``error`` and ``inherited`` stay None where the two models route other tokens to it."""

    name: str
    kind: str
    block: int
    layers: tuple[str, ...]
    format: Format = DENSE
    order: int = -1
    energy: float = 0.0
    weights: float = 0.0
    activations: float = 0.0
    error: float | None = 0.0
    inherited: float | None = 0.0
    cosines: float = 0.0
    tokens: int = 0
    max_error: float = 0.0

    @property
    def own(self) -> float:
        """Share of the output's energy that errors made here have."""
        return (self.weights + self.activations) / max(self.energy, 1e-300)


@dataclass(frozen=True)
class Compared:
    """``places`` in the order of computation; ``blocks`` are shares of the hidden state's energy that its error has
    after each block; ``kl`` is summed over each sequence, in nats (None without a head); hidden states [blocks + 1, n, T, H] of
    each model are those that enter each block, and the last one's output."""

    places: list[Place]
    blocks: list[float]
    kl: list[float] | None
    counts: list[int]
    original: Tensor
    compressed: Tensor
    streams: tuple[Stream, Stream]


def compare(job: DiagnoseJob, journal: Journal) -> Compared:
    """One forward pass of each model; working files lie in ``journal``."""
    streams = open_streams(job)
    ours, theirs = streams
    shape = (len(job.graph.blocks) + 1, *ours.hidden.shape)
    original = journal.tensor("original", shape, job.scan.dtype)
    compressed = journal.tensor("compressed", shape, job.scan.dtype)
    original[0], compressed[0] = ours.hidden, theirs.hidden
    places: list[Place] = []
    blocks: list[float] = []
    with steps("comparing", len(job.graph.blocks)) as progress:
        for index, path in enumerate(job.graph.blocks):
            known = journal.finished.get(f"compare {index}")
            # What blocks pass on to later ones is in the streams alone: those models go forward again.
            if known is not None and not ours.passed_on:
                places += [_place_of(record) for record in known["places"]]
                blocks.append(known["share"])
                progress.advance(path)
                continue
            ours.hidden, theirs.hidden = original[index].clone(), compressed[index].clone()
            before = load(job.original, path, dtype=job.scan.dtype, device=job.scan.device)
            after = load_compressed(job, index)
            found = _places_in(job, index, before)
            for number, batch in enumerate(ours.batches):
                outputs = _compare(
                    job,
                    found,
                    ours.valid[batch],
                    partial(run, ours, before, index, number),
                    partial(run, theirs, after, index, number),
                )
                ours.hidden[batch], theirs.hidden[batch] = (out.to(ours.hidden.device) for out in outputs)
            found = sorted((p for p in found if p.order >= 0), key=lambda p: p.order)
            share = _share(ours.hidden, theirs.hidden, ours.valid)
            unload(before)
            unload(after)
            original[index + 1], compressed[index + 1] = ours.hidden, theirs.hidden
            journal.finish(f"compare {index}", {"places": [_record_of(p) for p in found], "share": share})
            places += found
            blocks.append(share)
            progress.advance(path)
    ours.hidden, theirs.hidden = original[-1].clone(), compressed[-1].clone()
    if "compare ends" not in journal.finished:  # fixes that are kept overwrite the last hidden states
        found, kl = _compare_ends(job, streams)
        journal.finish("compare ends", {"places": [_record_of(p) for p in found], "kl": kl})
    ends = journal.finished["compare ends"]
    places += [_place_of(record) for record in ends["places"]]
    counts = scored_positions(job.original, ours).sum(1).tolist()
    return Compared(places, blocks, ends["kl"], counts, original, compressed, streams)


def _compare_ends(job: DiagnoseJob, streams: tuple[Stream, Stream]) -> tuple[list[Place], list[float] | None]:
    """What is found after the last block, and the KL of each sequence, if there is a head."""
    ours, theirs = streams
    scored = scored_positions(job.original, ours)
    kl: list[float] = []
    ends = _places_outside(job)
    with (
        loaded_ends(job.original, job.graph, dtype=job.scan.dtype, device=job.scan.device),
        loaded_ends(job.twin, job.graph, dtype=job.scan.dtype, device=job.scan.device),
    ):
        for number, batch in enumerate(ours.batches):
            finals = [stream.hidden[batch].to(job.scan.device) for stream in streams]
            before_logits, after_logits = _compare(
                job,
                ends,
                ours.valid[batch],
                partial(tail, job.original, job.graph, ours, number, finals[0]),
                partial(tail, job.twin, job.graph, theirs, number, finals[1]),
            )
            if job.graph.head:
                kl += sequence_kl(before_logits, after_logits, scored[batch])
    return sorted((p for p in ends if p.order >= 0), key=lambda p: p.order), kl if job.graph.head else None


def _record_of(place: Place) -> dict[str, Any]:
    return {**asdict(place), "format": place.format.name}


def _place_of(record: dict[str, Any]) -> Place:
    return Place(**{**record, "layers": tuple(record["layers"]), "format": parse_format(record["format"])})


def open_streams(job: DiagnoseJob) -> tuple[Stream, Stream]:
    """Both models' tokens before the first block, in equal batches: at least eight if there are as many sequences."""
    scan = job.scan
    sequences, length = scan.tokens.input_ids.shape
    vocabulary = getattr(scan.skeleton.config.get_text_config(), "vocab_size", 1) if job.graph.head else 1
    widest = max(max(layer.out_features, layer.in_features) for layer in job.graph.layers)
    # Inputs of every layer and five outputs of one in both models; about ten fp32 copies of the logits.
    per_sequence = length * max(24 * widest * scan.dtype.itemsize, 40 * vocabulary)
    rows = max(1, min(-(-sequences // _PARTS), int(job.settings.memory * 2**30) // per_sequence))

    def opened(skeleton: Any) -> Stream:
        return open_stream(
            skeleton,
            job.graph,
            scan.tokens.input_ids,
            scan.tokens.attention_mask,
            dtype=scan.dtype,
            device=scan.device,
            batch_bytes=2**62,
            batch_sequences=rows,
        )

    return opened(job.original), opened(job.twin)


def activation_formats(job: DiagnoseJob, index: int, block: nn.Module) -> dict[nn.Module, Format]:
    """The layers of block ``index`` whose inputs the engine quantizes."""
    path = f"{job.graph.blocks[index]}."
    return {
        block.get_submodule(layer.name.removeprefix(path)): job.formats[layer.name]
        for unit in job.graph.units_of(index)
        for layer in unit.layers
        if layer.name in job.formats and job.formats[layer.name].activations is not None
    }


def _places_in(job: DiagnoseJob, index: int, block: nn.Module) -> list[Place]:
    units = [
        Place(unit.name, unit.kind, index, tuple(la.name for la in unit.layers), job.format_of(unit))
        for unit in job.graph.units_of(index)
    ]
    path = job.graph.blocks[index]
    return units + [
        Place(f"{path}.{name}", "norm", index, (f"{path}.{name}",))
        for name, module in block.named_modules()
        if _is_norm(module)
    ]


def _places_outside(job: DiagnoseJob) -> list[Place]:
    """Norms outside the blocks, and layers there that are quantized."""
    blocks = tuple(f"{block}." for block in job.graph.blocks)
    count = len(job.graph.blocks)
    return [
        Place(name, "norm" if _is_norm(module) else "head", count, (name,), job.formats.get(name, DENSE))
        for name, module in job.original.module.named_modules()
        if not name.startswith(blocks) and (_is_norm(module) or name in job.formats)
    ]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _compare(
    job: DiagnoseJob,
    places: Sequence[Place],
    valid: Tensor,
    run_original: Callable[[], Tensor],
    run_compressed: Callable[[], Tensor],
) -> tuple[Tensor, Tensor]:
    """Run one batch through both models and add what is seen at ``places``; both outputs."""
    names = [name for place in places for name in place.layers]
    before = {name: job.original.module.get_submodule(name) for name in names}
    after = {name: job.twin.module.get_submodule(name) for name in names}
    formats = {name: place.format for place in places for name in place.layers}
    with torch.inference_mode():
        with _inputs(before) as seen:
            out = run_original()
        with _inputs(after, formats) as seen_after:
            out_after = run_compressed()
        order = {name: number for number, name in enumerate(seen)}
        for place in places:
            called = [name for name in place.layers if name in seen]
            if not called:
                continue
            place.order = min(order[name] for name in called)
            products: list[Tensor] = []
            for name in called:
                calls, calls_after = seen[name], seen_after.get(name, [])
                paired = len(calls) == len(calls_after) and all(
                    a[0][0].shape == b[0][0].shape for a, b in zip(calls, calls_after, strict=True)
                )
                if not paired:
                    place.error = place.inherited = None
                for number, call in enumerate(calls):
                    other = calls_after[number] if paired else None
                    found = _add(place, before[name], after[name], call, other, valid)
                    if found is not None:
                        products.append(found)
            _add_cosine(place, products)
    return out, out_after


def _add(
    place: Place, before: nn.Module, after: nn.Module, call: Call, other: Call | None, valid: Tensor
) -> Tensor | None:
    """Add one call of a layer to ``place``; returns |y|², |ŷ|² and y·ŷ of each token, [3, tokens], if the call has a
    counterpart. ``forward`` is called directly, so that hooks see nothing of it."""
    args, kwargs = call
    y = _forward(before, call)
    if y is None:
        return None
    mask = valid.to(y.device) if y.shape[:2] == valid.shape and not bool(valid.all()) else None

    def tokens(value: Tensor) -> Tensor:
        value = value.float()
        return value[mask] if mask is not None else value.reshape(-1, value.shape[-1])

    def square(value: Tensor) -> float:
        return float(tokens(value).square().sum(dtype=torch.float64))

    place.energy += square(y)
    moved = _forward(after, call)
    assert moved is not None
    place.weights += square(moved - y)
    if place.format.activations is not None:
        rounded = _forward(before, ((fake_quantize_activations(args[0], place.format), *args[1:]), kwargs))
        assert rounded is not None
        place.activations += square(rounded - y)
    if other is None or place.error is None or place.inherited is None:
        return None
    inherited = _forward(before, other)
    (first, *rest), kwargs_after = other
    got = _forward(after, ((fake_quantize_activations(first, place.format), *rest), kwargs_after))
    assert inherited is not None
    assert got is not None
    place.inherited += square(inherited - y)
    difference = tokens(got - y)
    place.error += float(difference.square().sum(dtype=torch.float64))
    if difference.numel():
        place.max_error = max(place.max_error, float(difference.abs().max()))
    flat, flat_got = tokens(y), tokens(got)
    pairs = ((flat, flat), (flat_got, flat_got), (flat, flat_got))
    return torch.stack([(a * b).flatten(1).sum(1) for a, b in pairs])


def _add_cosine(place: Place, products: list[Tensor]) -> None:
    """Cosines of whole tokens, the layers of a unit side by side."""
    if not products or len({p.shape for p in products}) > 1:
        return
    energy, energy_after, dot = torch.stack(products).sum(0)
    place.cosines += float((dot / (energy * energy_after).sqrt().clamp(min=1e-30)).sum(dtype=torch.float64))
    place.tokens += len(dot)


def _forward(module: nn.Module, call: Call) -> Tensor | None:
    output = module.forward(*call[0], **call[1])
    return output if isinstance(output, Tensor) else None


@contextmanager
def _inputs(
    modules: dict[str, nn.Module], formats: dict[str, Format] | None = None
) -> Iterator[dict[str, list[Call]]]:
    """The calls of each module inside, before ``formats`` quantize what the modules then get."""
    seen: dict[str, list[Call]] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args:  # called by keyword: its only tensor is its input
                args, kwargs = tuple(kwargs.values()), {}
            seen.setdefault(name, []).append((args, kwargs))
            if formats is None or formats[name].activations is None:
                return None
            return (fake_quantize_activations(args[0], formats[name]), *args[1:]), kwargs

        return note

    handles = [m.register_forward_pre_hook(hook(name), with_kwargs=True) for name, m in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _share(before: Tensor, after: Tensor, valid: Tensor) -> float:
    """|ĥ − h|² / |h|² over real tokens; a sequence at a time, as hidden states may be large."""
    error = energy = 0.0
    for b, a, mask in zip(before, after, valid, strict=True):
        b, a = b[mask].float(), a[mask].float()
        error += float((a - b).square().sum(dtype=torch.float64))
        energy += float(b.square().sum(dtype=torch.float64))
    return error / max(energy, 1e-300)
