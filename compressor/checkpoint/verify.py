"""Re-open a written checkpoint and prove it: files ⇔ config ⇔ plan ⇔ source ⇔ what engines load."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from compressor.checkpoint import file_checks, release, reload, serve, source_checks
from compressor.checkpoint.artifact import Artifact, make_artifact, read_json_config
from compressor.checkpoint.file_checks import Failed, Skipped
from compressor.checkpoint.reload import Reload
from compressor.checkpoint.sidecar import Sidecar, read_sidecar
from compressor.checkpoint.signature import check_signature
from compressor.checkpoint.source_checks import Pair
from compressor.console import steps
from compressor.errors import InputRefused, MachineLimit
from compressor.sources.model import Source
from compressor.sources.tensors import TensorEntry, index_directory

EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class Check:
    """One check: what it was, whether it held, and one line on what was found. A check that could not be
    made counts as passed, and its detail begins with ``skipped``."""

    name: str
    passed: bool
    detail: str


def verify(
    directory: Path,
    *,
    source: Source | None,
    engine: EngineName | None = None,
    engine_python: Path | None = None,
    public_key: Path | None = None,
    trust_remote_code: bool = False,
) -> list[Check]:
    """Make every check that can be made, in order from cheap to dear; never raises for a wrong checkpoint.

    ``source`` is the original, without which nothing is compared with it. ``engine`` starts transformers,
    or transformers and vLLM, on the checkpoint, each in a process of its own; ``engine_python`` is the
    interpreter that has vLLM. ``public_key`` asks for the signature that its private half made. Raises UsageError or MachineLimit when that is not there.
    """
    python = serve.engine_interpreter(engine_python) if engine == "vllm" else None
    trusted = trust_remote_code or (source is not None and source.trust_remote_code)
    opened, results = _open(directory)
    if opened is None:
        return results

    todo: list[tuple[str, Callable[[], str]]] = [
        (name, partial(check, opened)) for name, check in _FILE_CHECKS.items()
    ]
    if public_key is not None:
        todo.append(("signature", partial(check_signature, public_key, opened)))
    if source is not None:
        pair = Pair(opened, source)
        todo += [(name, partial(check, pair)) for name, check in _SOURCE_CHECKS.items()]
    engines: list[tuple[str, Callable[[], str]]] = []
    if engine is not None:
        reloading = Reload(opened, trusted)
        engines += [(name, partial(check, reloading)) for name, check in _RELOAD_CHECKS.items()]
    if python is not None:
        engines.append(("vllm", partial(serve.check_vllm, opened, python, trusted)))
    with steps("verifying", len(todo) + len(engines)) as progress:
        for name, check in todo:
            results.append(_made(name, check))
            progress.advance(name)
        sound = all(check.passed for check in results if check.name in _FILE_CHECKS)
        for name, check in engines:
            results.append(_made(name, check if sound else _not_started))
            progress.advance(name)
    return results


_FILE_CHECKS: dict[str, Callable[[Artifact], str]] = {
    "index": file_checks.check_index,
    "quantization config": file_checks.check_config,
    "targets": file_checks.check_targets,
    "plan": file_checks.check_plan,
    "tensors": file_checks.check_tensors,
    "values": file_checks.check_values,
    "kv cache": file_checks.check_kv_cache,
    "fused layers": file_checks.check_fused,
    "size": file_checks.check_size,
    "digests": file_checks.check_digests,
    "release": release.check_release,
}
_SOURCE_CHECKS: dict[str, Callable[[Pair], str]] = {
    "source": source_checks.check_source,
    "completeness": source_checks.check_completeness,
    "kept tensors": source_checks.check_kept_tensors,
    "quantized weights": source_checks.check_shapes,
    "model config": source_checks.check_model_config,
    "other files": source_checks.check_files,
    "coverage": source_checks.check_coverage,
}
_RELOAD_CHECKS: dict[str, Callable[[Reload], str]] = {
    "reloaded weights": reload.check_reloaded_weights,
    "reloaded outputs": reload.check_reloaded_outputs,
    "probe": reload.check_probe,
}


def _open(directory: Path) -> tuple[Artifact | None, list[Check]]:
    """The checkpoint, or the check that failed in opening it."""
    parts: dict[str, Any] = {}
    readers: dict[str, Callable[[Path], dict[str, TensorEntry] | dict[str, Any] | Sidecar | None]] = {
        "index": index_directory,
        "quantization config": read_json_config,
        "sidecar": read_sidecar,
    }
    failed = []
    for name, read in readers.items():
        try:
            parts[name] = read(directory)
        except InputRefused as error:
            failed.append(Check(name, False, str(error)))
    if failed:
        return None, failed
    try:
        return make_artifact(directory, parts["quantization config"], parts["index"], parts["sidecar"]), []
    except InputRefused as error:
        return None, [Check("quantization config", False, str(error))]


def _not_started() -> str:
    raise Skipped("no engine is started on files that do not agree with each other")


def _made(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Skipped as reason:
        return Check(name, True, f"skipped: {reason}")
    except (Failed, InputRefused) as reason:
        return Check(name, False, str(reason))
    except MachineLimit:
        raise
    except Exception as error:  # a checkpoint so wrong that a check could not follow it is a wrong checkpoint
        summary = " ".join(str(error).split())[:200]
        return Check(name, False, f"could not be checked: {type(error).__name__}: {summary}")
