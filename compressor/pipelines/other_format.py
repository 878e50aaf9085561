"""What ``quantize`` does alike for every output but compressed-tensors: refuse early, carry files over, publish or reject."""

import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from compressor.checkpoint.carried_files import carried_files, carried_name
from compressor.checkpoint.verify import Check
from compressor.checkpoint.writer import CheckpointWriter, refuse_source
from compressor.errors import MachineLimit, UsageError, VerificationFailed
from compressor.pipelines.job import open_recipe_model, refuse_existing
from compressor.recipes import Recipe
from compressor.sources.model import Source


def open_for(
    recipe: Recipe,
    target: Path | None,
    *,
    expressed: set[str],
    packages: Iterable[str],
    extra: str,
    overwrite: bool,
    dry_run: bool,
) -> Source:
    """The model of ``recipe``, opened after everything else that the output format does not allow is refused.

    ``expressed`` are the settings under ``quantize`` that the format has, too; ``extra`` installs ``packages``.
    Raises UsageError for any other setting and for a target that cannot be written, MachineLimit without the packages,
    InputRefused for a model that cannot be opened.
    """
    settings = recipe.quantize
    name = settings.format
    for key in sorted(settings.model_fields_set - expressed):
        raise UsageError(f"{key}: --format {name} cannot express it: leave it out")
    if recipe.verify.engine == "vllm":
        raise UsageError(f"--verify-engine vllm: stock vLLM does not load {name}: leave it out")
    if recipe.signing_key is not None:
        raise UsageError(f"signing_key: --format {name} writes no release files to sign: leave it out")
    for package in packages:
        if find_spec(package) is None:
            raise MachineLimit(f"--format {name} needs {package}: pip install 'compressor[{extra}]'")
    if target is None and not dry_run:
        raise UsageError("output: is needed: name the directory to write with --output")
    if target is not None:
        refuse_existing(target, overwrite)
    source = open_recipe_model(recipe)
    if target is not None:
        refuse_source(target, source)
    return source


def carry_files(source: Source, built: Path) -> None:
    """Copy tokenizer, chat template, licence and so on into ``built``, byte for byte."""
    for path in carried_files(source.path):
        copy = built / carried_name(path)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(source.path / path, copy)


def publish_checked(writer: CheckpointWriter, checks: list[Check]) -> None:
    """Publish what was built, or set it aside and raise VerificationFailed if one of ``checks`` did not pass."""
    failed = next((check for check in checks if not check.passed), None)
    if failed is not None:
        raise VerificationFailed(
            f"{writer.target}: not written: {failed.name}: {failed.detail} (rejected files: {writer.reject()})"
        )
    writer.publish()
