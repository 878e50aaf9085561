"""``plan.yaml``: made to be read and edited, one line a layer, one heading a unit."""

from pathlib import Path

import yaml

from compressor.errors import UsageError
from compressor.plans import Plan
from compressor.reports.write import write_atomically
from compressor.sensitivity.schema import Sensitivity

_HEAD = """\
# Made by `compressor plan`. Edit any format and run `compressor quantize {model} --plan {file}`:
# layers under one heading are fused by engines and must keep the same format.
"""


def plan_yaml(plan: Plan, scan: Sensitivity, file: Path) -> str:
    """The document. Each unit's heading says what its format is predicted to cost, and the alternatives."""
    lines = [_HEAD.format(model=plain(scan.model), file=file.name)]
    head = plan.model_dump(mode="json", exclude={"layers"}, exclude_none=True)
    lines.append(yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=1000).rstrip())
    lines.append("layers:")
    for unit in scan.units:
        chosen = plan.layers[unit.layers[0].name].format
        options = ", ".join(
            f"{name} {score.damage:.2g} ({score.bytes / 1e3:.0f} kB)"
            for name, score in unit.formats.items()
            if name != chosen
        )
        score = unit.formats[chosen]
        what = "relative output error" if scan.score == "output-mse" else "KL"
        lines.append(
            f"  # block {unit.block} {unit.kind}: {what} {score.damage:.2g} ({score.bytes / 1e3:.0f} kB); else {options}"
            if options
            else f"  # block {unit.block} {unit.kind}: {what} {score.damage:.2g}"
        )
        lines += [layer_line(layer.name, plan) for layer in unit.layers]
    if scan.kept:
        lines.append("  # kept as they are")
        lines += [layer_line(name, plan) for name in scan.kept]
    return "\n".join(lines) + "\n"


def write_plan(file: Path, text: str, *, overwrite: bool) -> None:
    """Write atomically. Raises UsageError when the file is taken and may not be replaced."""
    check_target(file, overwrite)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def check_target(file: Path, overwrite: bool) -> None:
    """Raise UsageError when ``file`` is taken and may not be replaced, or is a directory."""
    if file.is_dir():
        raise UsageError(f"{file}: is a directory: name a file")
    if file.exists() and not overwrite:
        raise UsageError(f"{file}: already exists: choose another output or pass --overwrite")


def layer_line(name: str, plan: Plan) -> str:
    """One layer's line of the document."""
    assignment = plan.layers[name].model_dump(mode="json", exclude_none=True)
    flow = yaml.safe_dump(
        assignment, sort_keys=False, default_flow_style=True, allow_unicode=True, width=10000
    )
    return f"  {plain(name)}: {flow.strip()}"


def plain(text: str) -> str:
    """``text`` as a YAML scalar, quoted only if it has to be."""
    return yaml.safe_dump(text, allow_unicode=True, width=10000).removesuffix("\n...\n").strip()
