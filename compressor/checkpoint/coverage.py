"""How much of a model got quantized."""

from collections.abc import Collection, Mapping

from torch import nn

from compressor.checkpoint.sidecar import CoverageFacts
from compressor.graph import ModelGraph, Skeleton


def coverage(
    skeleton: Skeleton, graph: ModelGraph, quantized: Collection[str], reasons: Mapping[str, str | None]
) -> CoverageFacts:
    """Quantized parameters over eligible ones: those of every stored matrix but the embeddings and the head.

    Matrices that are not in linear layers count as eligible, so a model whose weights sit in modules that
    compressor does not know is not passed off as quantized. ``reasons`` maps modules to why they stay.
    """
    exempt = {graph.embedding, graph.head}
    eligible = covered = 0
    uncovered: dict[str, str] = {}
    for name, entry in skeleton.stored.items():
        module = name.rpartition(".")[0]
        if sum(size > 1 for size in entry.shape) < 2 or module in exempt:
            continue
        if isinstance(skeleton.module.get_submodule(module), nn.Embedding):
            continue
        eligible += entry.numel
        if module in quantized and name.endswith(".weight"):
            covered += entry.numel
        else:
            kept = reasons.get(module) or reasons.get(name) or graph.kept.get(module) or graph.kept.get(name)
            uncovered[name] = kept or "not a linear layer that compressor knows"
    for name in skeleton.unused:
        entry = skeleton.source.tensors[name]
        if len(entry.shape) >= 2 and entry.torch_dtype.is_floating_point:
            eligible += entry.numel
            uncovered[name] = "unknown to the model class"
    return CoverageFacts(
        quantized_parameters=covered,
        eligible_parameters=eligible,
        ratio=covered / eligible if eligible else 0.0,
        uncovered=uncovered,
    )
