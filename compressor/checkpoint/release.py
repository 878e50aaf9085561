"""What makes a checkpoint fit to be passed on: model card, provenance and checksums.

``README.md``         the model card
``provenance.json``   an in-toto statement (v1) with SLSA provenance (v1): inputs, settings, versions, outputs
``SHA256SUMS``        digests of every file but itself, in the form that ``sha256sum --check`` reads

None of it depends on the time, the machine or where files lie: two equal runs write the same bytes.
https://in-toto.io/Statement/v1, https://slsa.dev/spec/v1.0/provenance
"""

import json
from pathlib import Path
from typing import Any

from compressor.checkpoint.artifact import Artifact, read_json_config
from compressor.checkpoint.card import CARD, model_card, portable, source_name
from compressor.checkpoint.file_checks import Failed, Skipped
from compressor.checkpoint.sidecar import Sidecar, read_sidecar
from compressor.checkpoint.signature import SIGNATURE
from compressor.evaluation.facts import installed
from compressor.reports.schema import Report
from compressor.reports.write import write_atomically
from compressor.sources.tensors import file_sha256

SUMS = "SHA256SUMS"
PROVENANCE = "provenance.json"
_PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors", "numpy")
# Beside a checkpoint, but no part of it: written after it, with times or random numbers in them.
_APART = {"report.json", "report.md", "report.html", "logs", SIGNATURE}
_PATHS = {"plan", "data", "engine_python"}


def write_release(directory: Path, *, base_model: str | None = None, report: Report | None = None) -> None:
    """Write or renew the three files in ``directory``, a checkpoint with ``compression.json``.

    Each is replaced at once, the checksums last: when this is cut short, ``verify`` says so, and another call
    puts it right.
    """
    sidecar = read_sidecar(directory)
    assert sidecar is not None
    config = read_json_config(directory)
    write_atomically(
        directory / CARD, model_card(directory, config, sidecar, base_model=base_model, report=report)
    )
    digests = _digests(directory, sidecar)
    statement = json.dumps(_statement(sidecar, digests), indent=2, ensure_ascii=False) + "\n"
    write_atomically(directory / PROVENANCE, statement)
    digests[PROVENANCE] = file_sha256(directory / PROVENANCE)
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    write_atomically(directory / SUMS, "".join(lines))


def check_release(artifact: Artifact) -> str:
    """Every file is the one in ``SHA256SUMS``, none is missing or unlisted, and the provenance names the same."""
    file = artifact.path / SUMS
    if not file.exists():
        raise Skipped(f"no {SUMS}")
    listed: dict[str, str] = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        digest, separator, name = line.partition("  ")
        if len(digest) != 64 or not separator or not _inside(name):
            raise Failed(f"{SUMS}, line {number}: not a SHA-256, two spaces and a file of this directory")
        listed[name] = digest
    weights = artifact.sidecar.files if artifact.sidecar is not None else {}
    for name, digest in listed.items():
        path = artifact.path / name
        if not path.is_file():
            raise Failed(f"{name}: in {SUMS}, but missing")
        # Weights that compression.json lists too have been read for the digests check.
        if (weights[name] if name in weights else file_sha256(path)) != digest:
            raise Failed(f"{name}: its bytes are not those in {SUMS}")
    unlisted = sorted(set(_files(artifact.path)) - set(listed))
    if unlisted:
        raise Failed(f"{unlisted[0]}: not in {SUMS}")
    if (artifact.path / PROVENANCE).exists():
        _check_provenance(artifact.path / PROVENANCE, listed)
    return f"SHA-256 of {len(listed)} files"


def _check_provenance(file: Path, listed: dict[str, str]) -> None:
    statement = json.loads(file.read_text("utf-8"))
    for subject in statement["subject"]:
        if listed.get(subject["name"]) != subject["digest"]["sha256"]:
            raise Failed(f"{PROVENANCE}: its digest of {subject['name']} is not the one in {SUMS}")


def _statement(sidecar: Sidecar, digests: dict[str, str]) -> dict[str, Any]:
    source = sidecar.source
    dependencies: list[dict[str, Any]] = []
    for name, digest in sorted(source.files.items()):
        item: dict[str, Any] = {"name": f"{source_name(sidecar)}/{name}", "digest": {"sha256": digest}}
        if source.kind == "hub":
            item["uri"] = f"https://huggingface.co/{source.ref}/resolve/{source.revision}/{name}"
        dependencies.append(item)
    if sidecar.calibration:
        dependencies.append(
            {
                "name": f"calibration data {portable(str(sidecar.calibration.get('source', '')))}",
                "digest": {"sha256": sidecar.calibration["sha256"]},
            }
        )
    # Purls and no addresses: builds are local, and there is no service to name.
    tool = f"pkg:pypi/{sidecar.tool.name}@{sidecar.tool.version}"
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{tool}#quantize",
                "externalParameters": {
                    "model": source_name(sidecar),
                    "revision": source.revision,
                    "quantize": _portable_settings(sidecar.settings),
                },
                "resolvedDependencies": dependencies,
            },
            "runDetails": {"builder": {"id": tool, "version": installed(_PACKAGES)}},
        },
    }


def _portable_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the last part of every path in the place of the path."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found[key] = _portable_settings(value)
        elif key in _PATHS and isinstance(value, str):
            found[key] = portable(value)
        else:
            found[key] = value
    return found


def _digests(directory: Path, sidecar: Sidecar) -> dict[str, str]:
    """SHA-256 by path; of the weights, as ``compression.json`` has it."""
    return {
        name: sidecar.files.get(name) or file_sha256(directory / name)
        for name in _files(directory)
        if name != PROVENANCE
    }


def _files(directory: Path) -> list[str]:
    """Every file of the checkpoint but the checksums themselves, with forward slashes."""
    found = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_file() and not hidden and relative.parts[0] not in {SUMS, *_APART}:
            found.append(relative.as_posix())
    return found


def _inside(name: str) -> bool:
    path = Path(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts
