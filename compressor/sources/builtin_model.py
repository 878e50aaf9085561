"""The model inside the package: a small Llama trained by ``scripts/train_tiny_model.py``."""

from importlib.resources import files
from pathlib import Path

from compressor.errors import InputRefused


def builtin_model_path() -> Path:
    """The directory of the built-in checkpoint (bf16 safetensors, config, tokenizer).

    Raises InputRefused when the package lies in an archive or was installed without its data.
    """
    path = files("compressor") / "data" / "tiny"
    if not isinstance(path, Path) or not (path / "model.safetensors").is_file():
        raise InputRefused("the built-in model is missing from this installation: reinstall compressor")
    return path
