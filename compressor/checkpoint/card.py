"""The model card of a checkpoint: ``README.md`` with the metadata that model hubs read.

Everything in it comes from the checkpoint itself and, once it has been evaluated, from its report; nothing from the
clock or the machine, so that two equal runs write the same card.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import yaml

from compressor.checkpoint.sidecar import Sidecar
from compressor.formats import parse_format
from compressor.reports import wording
from compressor.reports.markdown import cell
from compressor.reports.schema import Report

CARD = "README.md"
SOURCE_CARD = "README.source.md"

# What a source's card says of itself that is as true of its quantized copy.
_INHERITED = (
    "license",
    "license_name",
    "license_link",
    "language",
    "datasets",
    "pipeline_tag",
    "library_name",
)
_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}
_METRIC_TYPES = {"top1_agreement": "accuracy"}


def model_card(
    directory: Path,
    config: dict[str, Any],
    sidecar: Sidecar,
    *,
    base_model: str | None,
    report: Report | None,
) -> str:
    """The text of ``README.md`` for the checkpoint in ``directory``.

    ``base_model`` is the hub id of the original; without it, that of a source from the hub, and for a local source
    none is claimed. ``report`` adds what compression cost.
    """
    known = base_model or _hub_id(sidecar)
    inherited = _front_matter(directory / SOURCE_CARD)
    metadata: dict[str, Any] = {key: inherited[key] for key in _INHERITED if inherited.get(key)}
    if known:
        metadata |= {"base_model": known, "base_model_relation": "quantized"}
    sentence_transformers = (directory / "modules.json").exists()
    metadata.setdefault("library_name", "sentence-transformers" if sentence_transformers else "transformers")
    task = metadata.get("pipeline_tag") or _task(config, sentence_transformers)
    if task:
        metadata["pipeline_tag"] = task
    tags = inherited.get("tags") if isinstance(inherited.get("tags"), list) else []
    metadata["tags"] = list(dict.fromkeys([*(tags or []), "compressed-tensors", "quantized", "compressor"]))
    name = source_name(sidecar)
    formats = _formats(sidecar)
    title = f"{name}, {' + '.join(formats)}"
    metadata |= _results(title, task, report)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("compressor.checkpoint"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        cell=cell,
        estimate=wording.estimate,
        change=wording.change,
        size=wording.size,
        percent=wording.percent,
    )
    text = environment.get_template("card.md.j2").render(
        title=title,
        name=name,
        base_model=known,
        revision=sidecar.source.revision,
        formats=formats,
        sidecar=sidecar,
        report=report,
        task=task,
        metric_label=wording.label,
        has_source_card=(directory / SOURCE_CARD).exists(),
        calibration_source=portable(str((sidecar.calibration or {}).get("source", ""))),
    )
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n{text}"


def source_name(sidecar: Sidecar) -> str:
    """A name for the original that says nothing of the machine: a hub id, or the last part of a path."""
    on_disk = sidecar.source.kind in ("directory", "gguf")
    return Path(sidecar.source.ref.rstrip("/")).expanduser().resolve().name if on_disk else sidecar.source.ref


def portable(ref: str) -> str:
    """The last part of a path; anything else as it is."""
    local = ref.startswith(("/", ".", "~")) or "\\" in ref or Path(ref).expanduser().exists()
    return Path(ref.rstrip("/")).expanduser().resolve().name if local and ref else ref


def _hub_id(sidecar: Sidecar) -> str | None:
    """The hub id of the source: as named, or as the hub's cache directory spells it."""
    if sidecar.source.kind == "hub":
        return sidecar.source.ref
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", sidecar.source.ref)
    return f"{cached[1]}/{cached[2]}" if cached else None


def _task(config: dict[str, Any], sentence_transformers: bool) -> str | None:
    if sentence_transformers:
        return "sentence-similarity"
    architecture = str((config.get("architectures") or [""])[0])
    found = next((task for suffix, task in _TASKS.items() if architecture.endswith(suffix)), None)
    return found or ("feature-extraction" if architecture.endswith("Model") else None)


def _formats(sidecar: Sidecar) -> dict[str, tuple[int, int]]:
    """Layers and bytes of each quantized format, the most used first."""
    layers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for assignment in sidecar.plan.layers.values():
        if parse_format(assignment.format).quantized:
            layers[assignment.format] += 1
            sizes[assignment.format] += assignment.bytes or 0
    return {name: (count, sizes[name]) for name, count in sorted(layers.items(), key=lambda i: (-i[1], i[0]))}


def _results(title: str, task: str | None, report: Report | None) -> dict[str, Any]:
    """The ``model-index`` entry: what was measured of the compressed model."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    if report is None or report.evaluation is None:
        return {}
    dataset = portable(report.evaluation.data.source)
    results = [
        EvalResult(
            task_type=task or report.evaluation.task,
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=_METRIC_TYPES.get(name, name),
            metric_name=wording.label(name, metric),
            metric_value=metric.compressed.value,
        )
        for name, metric in report.evaluation.metrics.items()
    ]
    return {"model-index": eval_results_to_model_index(title, results)}


def _front_matter(file: Path) -> dict[str, Any]:
    """The metadata of a card, empty where there is none that can be read."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    found = re.match(r"\A\ufeff?---\s*\n(.*?)\n---\s*(\n|\Z)", text, re.DOTALL)
    if found is None:
        return {}
    try:
        data = yaml.safe_load(found[1])
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, dict) else {}
