"""``recipe.lock.yaml``: the recipe of a run with every value filled in, and what it found on this machine.

It is a recipe itself: ``compressor run recipe.lock.yaml`` repeats the run, refuses inputs that are no longer the same
and says which versions differ.
"""

import hashlib
import platform
from pathlib import Path

import yaml

from compressor import __version__
from compressor.checkpoint.carried_files import carried_files
from compressor.console import warn
from compressor.errors import InputRefused
from compressor.evaluation.facts import installed
from compressor.pipelines.job import open_recipe_model
from compressor.recipes import Locked, Recipe
from compressor.reports.write import write_atomically
from compressor.sources.model import Source, open_model
from compressor.sources.tensors import file_sha256

LOCK = "recipe.lock.yaml"
_PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors", "numpy", "scipy", "tokenizers")
_HEAD = "# Every value of the run in this directory. `compressor run recipe.lock.yaml --output ANOTHER` repeats it.\n"


def versions() -> dict[str, str]:
    """What the results depend on."""
    return {"compressor": __version__, "python": platform.python_version()} | installed(_PACKAGES)


def model_digest(source: Source) -> str:
    """SHA-256 over names and contents of a model's weights, config and other files."""
    names = [file.relative_to(source.path) for file in source.weight_files]
    names += [Path("config.json"), *carried_files(source.path)]
    return _digest_of(source.path, names)


def data_digest(ref: str) -> str:
    """SHA-256 of a local data set; for the built-in text, the versions it comes with; else the reference itself."""
    if ref.partition(":")[0] == "builtin":
        return f"compressor {__version__}, Python {platform.python_version()}"
    path = Path(ref).expanduser()
    if path.is_file():
        return file_sha256(path)
    if path.is_dir():
        return _digest_of(path, [file.relative_to(path) for file in path.rglob("*") if file.is_file()])
    return f"hub {ref}"


def inputs(recipe: Recipe) -> dict[str, str]:
    """Digests of everything that ``recipe`` reads, by the key that names it."""
    found = {"model": model_digest(open_recipe_model(recipe))}
    data = {
        "quantize.calibration.data": None
        if recipe.quantize.method == "rtn"
        else recipe.quantize.calibration.data
    }
    if recipe.scan is not None:
        data["scan.data.data"] = recipe.scan.data.data
    if recipe.evaluate is not None:
        data["evaluate.data"] = recipe.evaluate.data
    if recipe.distill is not None:
        for part in ("train", "evaluate", "test"):
            data[f"distill.data.{part}"] = getattr(recipe.distill.data, part)
    found |= {key: data_digest(ref) for key, ref in data.items() if ref is not None}
    student = (recipe.distill.student or "") if recipe.distill is not None else ""
    local = Path(student.removeprefix("quantized:")).expanduser()
    if student and local.is_dir():
        found["distill.student"] = model_digest(open_model(str(local), allow_quantized=True))
    files = {"quantize.plan": recipe.quantize.plan, "plan.costs": recipe.plan.costs if recipe.plan else None}
    found |= {key: file_sha256(file) for key, file in files.items() if file is not None and file.is_file()}
    return found


def write_lock(recipe: Recipe, found: dict[str, str], device: str, directory: Path) -> None:
    """Write the lock of ``recipe`` into its run directory."""
    document = recipe.model_dump(mode="json", exclude={"locked"})
    document["locked"] = {"device": device, "versions": versions(), "inputs": found}
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / LOCK, _HEAD + yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def check_locked(locked: Locked, found: dict[str, str]) -> None:
    """Raise InputRefused for the first input that is not the one of the lock; warn of other versions."""
    for key, digest in locked.inputs.items():
        if key in found and found[key] != digest:
            raise InputRefused(
                f"{key}: its content is not that of the lock ({digest[:16]}…, now {found[key][:16]}…)"
            )
    now = versions()
    other = [
        f"{name} {old} (now {now.get(name)})" for name, old in locked.versions.items() if now.get(name) != old
    ]
    if other:
        warn(f"the lock was made with other versions, so results may differ: {', '.join(other)}")


def _digest_of(directory: Path, names: list[Path]) -> str:
    whole = hashlib.sha256()
    for name in sorted(names, key=Path.as_posix):
        whole.update(f"{name.as_posix()}\0{file_sha256(directory / name)}\n".encode())
    return whole.hexdigest()
