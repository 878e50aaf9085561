"""Which files of a source directory belong to the model besides its weights: they are carried over unchanged.

All keep their names but the README: ``README.md`` is the checkpoint's own model card, so the source's becomes
``README.source.md``, byte for byte.
"""

import json
import re
from pathlib import Path

# Weights, in this or any other representation; training state; indexes of them.
_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack",
    ".ot", ".tflite", ".mlmodel", ".npz", ".pkl", ".xml",
}  # fmt: skip
# What a checkpoint gets anew: a source's own say nothing about it.
_WRITTEN = {"config.json", "compression.json", "SHA256SUMS", "provenance.json", "model.sig"}
_REPORT = {"report.json", "report.md", "report.html", "logs"}
_README = re.compile(r"README((?:\.source)*)\.md")


def carried_files(directory: Path) -> list[Path]:
    """Paths, relative to ``directory`` and sorted: tokenizer, chat template, generation config, code, licence.

    Hidden files are left out, and so are whatever holds weights and the report and logs of a distillation. Subdirectories count one level deep: those
    that ``modules.json`` lists (sentence-transformers' pooling, dense and so on) with all their files, others
    unless they hold weights, since then they are another representation of the model (``onnx/``, ``original/``,
    ``checkpoint-500/``).
    """
    modules = _module_directories(directory)
    written = _WRITTEN | (_REPORT if _has_own_report(directory) else set())
    found: list[Path] = []
    for path in _visible(directory):
        if path.name in written:
            continue
        if path.is_file():
            if not _is_weights(path):
                found.append(path)
        elif path.is_dir():
            files = [file for file in _visible(path) if file.is_file()]
            if path.name in modules or not any(_is_weights(file) for file in files):
                found += files
    return sorted(path.relative_to(directory) for path in found)


def carried_name(path: Path) -> Path:
    """What a carried file is called in the checkpoint: ``README.md`` becomes ``README.source.md``, and one of that
    name ``README.source.source.md``; all others keep their names."""
    found = _README.fullmatch(str(path))
    return Path(f"README{found[1]}.source.md") if found else path


def _has_own_report(directory: Path) -> bool:
    try:
        report = json.loads((directory / "report.json").read_text("utf-8"))
        return bool(report["tool"]["name"] == "compressor")
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _visible(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if not path.name.startswith((".", "__pycache__"))]


def _is_weights(path: Path) -> bool:
    return path.suffix.lower() in _WEIGHTS or path.name.endswith(".index.json")


def _module_directories(directory: Path) -> set[str]:
    try:
        modules = json.loads((directory / "modules.json").read_text("utf-8"))
        return {str(module["path"]) for module in modules if module.get("path")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return set()
