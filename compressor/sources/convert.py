"""GGUF and pickled checkpoints, converted once to a safetensors directory in the cache."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from compressor.console import note
from compressor.errors import InputRefused
from compressor.sources.tensors import SINGLE


def cache_directory() -> Path:
    """Where converted checkpoints are kept: ``$COMPRESSOR_CACHE``, else the user's cache folder."""
    if explicit := os.environ.get("COMPRESSOR_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "compressor"


def convert_gguf(file: Path) -> Path:
    """A safetensors directory with the dequantized weights of a GGUF file and its tokenizer.

    Weights are stored in fp32: GGUF's block formats are products of an fp16 scale and a small integer,
    which 16-bit floats cannot hold exactly.
    """

    def build(target: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        note(f"converting {file.name} to safetensors (once)")
        with _quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32
            )
        tokenizer.save_pretrained(target)
        config = model.config.to_diff_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            config.pop(key, None)
        config |= {"architectures": [type(model).__name__], "dtype": "float32"}
        (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
        if model.generation_config is not None:
            model.generation_config.save_pretrained(target)
        tied = (
            set(getattr(model, "_tied_weights_keys", None) or ())
            if model.config.tie_word_embeddings
            else set()
        )
        weights = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
        save_file(weights, target / SINGLE, metadata={"format": "pt"})

    return _converted(file, [file], build)


def convert_pickle(directory: Path, pickles: list[Path]) -> Path:
    """A safetensors directory with the weights of ``pytorch_model*.bin``, read with ``weights_only=True``."""

    def build(target: Path) -> None:
        weights: dict[str, Tensor] = {}
        for pickled in pickles:
            try:
                weights |= torch.load(pickled, map_location="cpu", weights_only=True)
            except Exception as error:
                raise InputRefused(
                    f"{pickled}: not a plain state dict ({type(error).__name__}): refused as unsafe"
                ) from None
        for file in directory.iterdir():
            if file.is_file() and not file.name.startswith("pytorch_model"):
                shutil.copyfile(file, target / file.name)
        # A shared storage (a tie) is written once per name: safetensors has no aliases.
        save_file(
            {k: v.clone().contiguous() for k, v in weights.items()},
            target / SINGLE,
            metadata={"format": "pt"},
        )

    return _converted(directory, pickles, build)


def _converted(origin: Path, files: list[Path], build: Callable[[Path], None]) -> Path:
    stats = [f"{f.resolve()}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files]
    key = hashlib.sha256("\n".join(stats).encode()).hexdigest()[:16]
    target = cache_directory() / "converted" / f"{origin.stem}-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        build(unfinished)
        with contextlib.suppress(FileExistsError):
            unfinished.rename(target)
    except InputRefused:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputRefused(f"{origin}: cannot be converted to safetensors ({reason})") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
