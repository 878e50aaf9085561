"""Open a model: a directory, a hub id, a GGUF file or the built-in one, always ending as a directory.

Whatever the user names becomes a :class:`Source`: a local directory with ``config.json``, safetensors
and tokenizer files, whose tensors are known by header only. GGUF and pickled checkpoints are converted
once into the cache, so that everything after this file sees one kind of input.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compressor.errors import InputRefused, UsageError
from compressor.sources.builtin_model import builtin_model_path
from compressor.sources.convert import convert_gguf, convert_pickle
from compressor.sources.tensors import INDEX, SINGLE, TensorEntry, index_directory

Kind = Literal["directory", "hub", "gguf", "builtin"]
BUILTIN = "builtin"
_QUANTIZED_SUFFIXES = (".weight_packed", ".qweight", ".weight_scale", ".weight.absmax", ".weight_scale_inv")


@dataclass(frozen=True)
class Source:
    """An opened model; no weight has been read yet.

    ``ref`` is what the user wrote, ``path`` the local directory, ``revision`` the hub commit (if any),
    ``config`` the parsed ``config.json``, ``tensors`` every stored tensor by name.
    """

    ref: str
    kind: Kind
    path: Path
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    trust_remote_code: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the checkpoint is already quantized, by its config or by its tensors."""
        return "quantization_config" in self.config or any(
            name.endswith(_QUANTIZED_SUFFIXES) for name in self.tensors
        )

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files, sorted."""
        return sorted({entry.file for entry in self.tensors.values()})


def open_model(
    ref: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    allow_quantized: bool = False,
) -> Source:
    """Open the model that ``ref`` names.

    Raises InputRefused when it is missing, corrupt, unsafe (pickle without ``allow_pickle``, custom
    code without ``trust_remote_code``) or already quantized (without ``allow_quantized``).
    """
    kind, path, commit = _locate(ref, revision, trust_remote_code)
    if kind == "gguf":
        path = convert_gguf(path)
    elif not (path / SINGLE).exists() and not (path / INDEX).exists():
        pickles = sorted(path.glob("pytorch_model*.bin"))
        if not pickles:
            raise InputRefused(
                f"{path}: no {SINGLE} or {INDEX} in it, so it is not a transformers checkpoint"
            )
        if not allow_pickle:
            raise InputRefused(
                f"{pickles[0]}: pickled weights can run code: convert to safetensors or pass --allow-pickle"
            )
        path = convert_pickle(path, pickles)

    config = _read_config(path)
    if "auto_map" in config and not trust_remote_code:
        raise InputRefused(
            f"{path / 'config.json'}: the model needs its own code (auto_map): read it, then pass --trust-remote-code"
        )
    source = Source(ref, kind, path, commit, config, index_directory(path), trust_remote_code)
    if source.quantized and not allow_quantized:
        method = (config.get("quantization_config") or {}).get("quant_method", "packed tensors")
        raise InputRefused(f"{path}: already quantized ({method}): start from the original checkpoint")
    return source


def _locate(ref: str, revision: str | None, trust_remote_code: bool) -> tuple[Kind, Path, str | None]:
    if ref == BUILTIN:
        return "builtin", builtin_model_path(), None
    path = Path(ref).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return "gguf", path.resolve(), None
        raise InputRefused(f"{path}: a model is a directory, a .gguf file or a hub id, not this file")
    if path.is_dir():
        if revision is not None:
            raise UsageError(f"--revision {revision} is for hub ids, and {ref} is a local directory")
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not (path / "config.json").exists():
            raise InputRefused(f"{path}: name the GGUF file itself, for example {ggufs[0]}")
        return "directory", path.resolve(), None
    if ref.startswith((".", "/", "~")) or ref.count("/") > 1 or ref.endswith(".gguf"):
        raise InputRefused(f"{ref}: no such file or directory")
    return ("hub", *_download(ref, revision, trust_remote_code))


def _download(ref: str, revision: str | None, trust_remote_code: bool) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [
        "*.json",
        "*.safetensors",
        "*.model",
        "*.txt",
        "*.jinja",
        "*.tiktoken",
        "*.spm",
        "README.md",
        "LICENSE*",
    ]
    if trust_remote_code:
        patterns.append("*.py")
    try:
        path = Path(snapshot_download(ref, revision=revision, allow_patterns=patterns))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputRefused(f"{ref}: neither a local path nor a model the hub gives us ({reason})") from None
    return path, path.name  # a snapshot directory is named for its commit


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError:
        raise InputRefused(f"{path}: no config.json in it, so it is not a transformers checkpoint") from None
    except ValueError:
        raise InputRefused(f"{file}: not valid JSON") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise InputRefused(f"{file}: has no model_type, so transformers cannot tell what model this is")
    return config


def load_tokenizer(source: Source) -> Any:
    """The tokenizer stored with the model.

    Raises InputRefused when there is none or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds here, all meaning the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputRefused(f"{source.path}: its tokenizer cannot be loaded ({reason})") from None
    # Where the files are missing, transformers 5 makes one of the model's kind that knows no text: special tokens
    # and, for some kinds, a piece or two.
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)) + 2:
        raise InputRefused(
            f"{source.path}: has no tokenizer files: copy tokenizer.json and tokenizer_config.json to it"
        )
    return tokenizer


def longest_sequence(config: dict[str, Any]) -> int | None:
    """Tokens that a model has positions for, by its ``config.json``; None where that does not say."""
    longest: int | None = (config.get("text_config") or config).get("max_position_embeddings")
    return longest
