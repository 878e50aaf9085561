"""The plan: which format every layer gets, and why.

A plan is what ``compressor plan`` writes, what a person may edit, and what ``compressor quantize --plan``
carries out. It lists every layer by its full module name, so that nothing is left to pattern matching.
"""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from compressor.errors import UsageError
from compressor.formats import parse_format


class Assignment(BaseModel):
    """One layer's format; ``bytes`` is what it takes in the checkpoint, ``reason`` why it is what it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str
    bytes: int | None = None
    reason: str | None = None


class Plan(BaseModel):
    """Format per layer. ``model`` is what the plan was made for, as its author named it.

    What ``compressor plan`` made it for and expects of it is for the reader: the ``budget`` as given, the
    size of the whole checkpoint, and KL(original ‖ compressed) in nats per token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    model: str
    budget: str | None = None
    total_bytes: int | None = None
    predicted_kl: float | None = None
    layers: dict[str, Assignment]

    def quantized(self) -> dict[str, Assignment]:
        """The layers that do get quantized."""
        return {name: a for name, a in self.layers.items() if parse_format(a.format).quantized}

    def kept(self) -> dict[str, Assignment]:
        """The layers that stay as they are."""
        return {name: a for name, a in self.layers.items() if not parse_format(a.format).quantized}


def read_plan(file: Path) -> Plan:
    """Parse ``plan.yaml``. Raises UsageError naming file, line and key."""
    try:
        text = file.read_text("utf-8-sig")
        data = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(
            f"{file}{where}: not valid YAML ({getattr(error, 'problem', 'unreadable')})"
        ) from None
    try:
        plan = Plan.model_validate(data)
        for name, assignment in plan.layers.items():
            try:
                parse_format(assignment.format)
            except UsageError as error:
                raise UsageError(
                    f"{file}, line {line_of(text, 'layers', name)}: layer {name}: {error}"
                ) from None
        return plan
    except ValidationError as error:
        first = error.errors()[0]
        keys = [str(key) for key in first["loc"]]
        line = line_of(text, *keys)
        raise UsageError(f"{file}, line {line}: {'.'.join(keys) or 'the document'}: {first['msg']}") from None


def line_of(text: str, *keys: str) -> int:
    """The line (from 1) on which the YAML mapping key path ``keys`` starts, as deep as it can be followed."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    line = 1
    for key in keys:
        children: list[tuple[yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            children = [(k, v) for k, v in node.value if str(getattr(k, "value", "")) == key]
        elif isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
            item = node.value[int(key)]
            children = [(item, item)]
        if not children:
            break
        line = children[0][0].start_mark.line + 1
        node = children[0][1]
    return line
