"""Which files of a source directory belong to the model besides its weights: they are carried over unchanged."""

import json
from pathlib import Path

# Weights, in this or any other representation; training state; indexes of them.
_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack",
    ".ot", ".tflite", ".mlmodel", ".npz", ".pkl", ".xml",
}  # fmt: skip
_WRITTEN = {"config.json", "compression.json"}


def carried_files(directory: Path) -> list[Path]:
    """Paths, relative to ``directory`` and sorted: tokenizer, chat template, generation config, code, licence.

    Hidden files are left out, and so is whatever holds weights. Subdirectories count one level deep: those
    that ``modules.json`` lists (sentence-transformers' pooling, dense and so on) with all their files, others
    unless they hold weights, since then they are another representation of the model (``onnx/``, ``original/``,
    ``checkpoint-500/``).
    """
    modules = _module_directories(directory)
    found: list[Path] = []
    for path in _visible(directory):
        if path.is_file():
            if not _is_weights(path) and path.name not in _WRITTEN:
                found.append(path)
        elif path.is_dir():
            files = [file for file in _visible(path) if file.is_file()]
            if path.name in modules or not any(_is_weights(file) for file in files):
                found += files
    return sorted(path.relative_to(directory) for path in found)


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
