"""Write the reference pages of the documentation from the code that they describe: ``python scripts/reference.py``.

Options come from the command line's own definitions, recipe and report keys from their models, tables of formats and
engines and exit codes from the modules that decide by them. A test holds the files in docs/reference/ to what this makes.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from compressor import errors
from compressor.cli.documents import DOCUMENTS
from compressor.cli.main import app
from compressor.engines.check import ENGINES
from compressor.formats import parse_format
from compressor.formats.format import GROUP_SIZES, stored_bytes
from compressor.recipes import Recipe
from compressor.reports.schema import Report

PAGES = Path(__file__).parent.parent / "docs" / "reference"
SHOWN = ("w4g128", "w4g64", "w4g32", "w4", "w3g32", "w8", "w8g128", "w8a8", "fp8", "bf16")


def commands() -> str:
    lines = [
        "# Commands",
        "",
        "Results go to standard output, notes, progress and errors to standard error. `--debug`, anywhere, shows the traceback",
        "of an error. See also [exit codes](exit-codes.md) and the [schemas of what `--json` prints](json.md).",
        "",
    ]
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        parameters = _parameters(command.callback)
        arguments = [p for p in parameters if isinstance(p.info, ArgumentInfo)]
        shown = [p.name.upper() if p.default is p.empty else f"[{p.name.upper()}]" for p in arguments]
        lines += [f"## {name}", "", _prose(command.callback.__doc__), ""]
        lines += ["```text", " ".join([f"compressor {name}", *shown, "[OPTIONS]"]), "```", ""]
        rows = [(f"`{a.name.upper()}`", a.info.help or "") for a in arguments]
        lines += _table(("argument", ""), rows)
        panels: dict[str, list[tuple[str, ...]]] = {}
        for option in (p for p in parameters if p not in arguments):
            row = (_names(option), option.info.help or "", _option_default(option))
            panels.setdefault(option.info.rich_help_panel or "Options", []).append(row)
        for panel, rows in panels.items():
            lines += _table((panel, "", "default"), rows)
    return "\n".join(lines)


@dataclass(frozen=True)
class Parameter:
    """A command's argument or option, as its function declares it."""

    name: str
    kind: Any
    info: ArgumentInfo | OptionInfo
    default: Any
    empty: ClassVar[Any] = inspect.Parameter.empty


def _parameters(command: Callable[..., Any]) -> list[Parameter]:
    hints = get_type_hints(command, include_extras=True)
    found = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind, info = get_args(hints[name])
        found.append(Parameter(name, kind, info, parameter.default))
    return found


def recipe_keys() -> str:
    intro = (
        "A recipe is a YAML file with these keys. Unknown ones and wrong types are refused with file and line. Options of the "
        "command line win over a recipe, and a recipe over the defaults here."
    )
    return "\n".join(
        ["# Recipe keys", "", intro, "", *_models(Recipe.model_json_schema(), "Recipe", by_path=True)]
    )


def report_keys() -> str:
    intro = (
        "`report.json`, which `run`, `distill` and `evaluate` write and print. `null` is what a command had nothing to say about. "
        "[Its schema](json.md) is for machines."
    )
    schema = Report.model_json_schema(mode="serialization")
    return "\n".join(["# Report keys", "", intro, "", *_models(schema, "Report")])


def json_documents() -> str:
    intro = (
        "With `--json` a command prints one document and nothing else to standard output. Each has a JSON schema (draft 2020-12) "
        "in `compressor/schemas/`, which is installed with the package; `python -m compressor.cli.documents` makes them."
    )
    rows = []
    for name in DOCUMENTS:
        printed = {
            "report": "`run`, `distill`, `evaluate`; also `report.json`",
            "sensitivity": "the file that `scan-sensitivity` writes",
            "diagnosis": "`diagnose`; also `diagnosis.json`",
            "distill-cache": "`distill --cache-only`",
            "dry-run": "`--dry-run` of every command but `plan`",
        }.get(name, f"`{name}`")
        rows.append((f"`{name}.schema.json`", printed))
    return "\n".join(["# Schemas of `--json`", "", intro, "", *_table(("schema", "of what"), rows)])


def exit_codes() -> str:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c is not errors.CompressorError]
    rows = [
        ("0", "Done and verified."),
        ("1", "An unexpected failure; `--debug` shows the traceback."),
        *((str(c.exit_code), _prose(c.__doc__)) for c in sorted(classes, key=lambda c: c.exit_code)),
        (str(errors.INTERRUPTED), "Interrupted; the same command goes on where it stopped."),
    ]
    intro = (
        "Every error is one line that names the file, layer or key at fault and says what to do. A checkpoint that failed its "
        "verification (4) is kept aside as `NAME.rejected`; what a gate failed (3) stays where it is, marked."
    )
    return "\n".join(["# Exit codes", "", intro, "", *_table(("code", "meaning"), rows)])


def formats_and_engines() -> str:
    rows = []
    for name in SHOWN:
        fmt = parse_format(name)
        if not fmt.quantized:
            rows.append((f"`{name}`", "as in the source", "as they are", "16"))
            continue
        scale = "channel" if fmt.group_size is None else f"{fmt.group_size} inputs"
        kind = "FP8 E4M3" if fmt.kind == "fp8" else f"INT{fmt.bits}"
        inputs = {None: "as they are", "int8": "INT8, per token", "fp8": "FP8, per token"}[fmt.activations]
        side = 4096
        bits = 8 * stored_bytes(fmt, side, side, 2) / side**2
        rows.append((f"`{name}`", f"{kind}, one scale per {scale}", inputs, f"{bits:.4g}"))
    lines = [
        "# Formats and engines",
        "",
        f"All are symmetric. Two to eight bits are accepted (`w2` to `w8`), with groups of {', '.join(map(str, GROUP_SIZES))} inputs or",
        "one scale per channel; bits are of a 4096 × 4096 layer, scales included. `W4A16`, `W8A16` and `FP8_DYNAMIC` are understood.",
        "They are written as [compressed-tensors](https://github.com/vllm-project/compressed-tensors).",
        "",
        *_table(("format", "weights", "inputs", "bits a weight"), rows),
        "## What engines load",
        "",
        "`--engine` refuses the rest before any work. Sides are of a layer as it is stored.",
        "",
    ]
    for name, engine in ENGINES.items():
        loads = []
        for row in engine.rows:
            sides = [
                f"{what} a multiple of {side}"
                for what, side in (("inputs", row.inputs), ("outputs", row.outputs))
                if side > 1
            ]
            gpu = [f"compute capability {row.capability / 10:.1f} or higher"] if row.capability else []
            gpu += [f"below {row.before / 10:.1f}"] if row.before < 1000 else []
            loads.append((_family(row.formats), ", ".join([*sides, *gpu]) or "any shape"))
        loads += [
            (_family(r.formats), f"no: {r.reason}" + (f"; use `{r.nearest}`" if r.nearest else ""))
            for r in engine.refusals
        ]
        kinds = {"conv1d": "GPT-2's Conv1D", "expert": "experts"}
        loads += [(_family(f.formats), f"of {kinds[f.form]}, only these: {f.reason}") for f in engine.forms]
        lines += [f"### {name}", "", *_table(("format", ""), loads)]
    return "\n".join(lines)


def _models(schema: dict[str, Any], root: str, *, by_path: bool = False) -> list[str]:
    """A section for each model of a JSON schema, in the order in which they are first referred to; headed by the model's
    name, or by the keys that it is at."""
    definitions = {**schema.get("$defs", {}), root: schema}
    paths: dict[str, list[str]] = {root: [""]}
    for name in (order := [root]):
        for key, value in definitions[name].get("properties", {}).items():
            for found in re.findall(r"#/\$defs/(\w+)", str(value)):
                if definitions[found].get("properties"):
                    paths.setdefault(found, []).append(f"{paths[name][0]}.{key}".strip("."))
                    order += [found] if found not in order else []
    titles = {name: ", ".join(paths[name]) if by_path else name for name in order}
    lines = []
    for name in order:
        model = definitions[name]
        shown = [] if name == root else [f"## {titles[name]}", ""]
        lines += [*shown, _prose(model.get("description", "")), ""]
        required = model.get("required", [])
        rows = [
            (
                f"`{key}`",
                _type(value, definitions, titles).removesuffix(" or null"),
                "needed" if key in required else _value(value.get("default")),
            )
            for key, value in model["properties"].items()
        ]
        lines += _table(("key", "type", "default"), rows)
    return lines


def _type(value: dict[str, Any], definitions: dict[str, Any], titles: dict[str, str]) -> str:
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[1]
        found = definitions[name]
        if name in titles:
            slug = re.sub(r"[^\w\s-]", "", titles[name].lower()).replace(" ", "-")
            return f"[{titles[name]}](#{slug})"
        return _type(found, definitions, titles)
    if "anyOf" in value:
        return " or ".join(_type(option, definitions, titles) for option in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    match value.get("type"):
        case "array" if "prefixItems" in value:
            return "list of " + ", ".join(_type(item, definitions, titles) for item in value["prefixItems"])
        case "array":
            return f"list of {_type(value.get('items', {}), definitions, titles)}"
        case "object" if isinstance(value.get("additionalProperties"), dict):
            return f"name → {_type(value['additionalProperties'], definitions, titles)}"
        case "object":
            return "mapping"
        case None:
            return "anything"
    bounds = [
        f"{sign} {value[key]:g}"
        for key, sign in (
            ("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"),
        )
        if key in value
    ]  # fmt: skip
    kind = {"null": "null", "string": "text", "boolean": "true or false"}.get(value["type"], value["type"])
    kind = "file or directory" if value.get("format") == "path" else kind
    return f"{kind} {', '.join(bounds)}".strip()


def _value(default: Any) -> str:
    match default:
        case None:
            return ""
        case dict():
            return "its own defaults"
        case bool():
            return f"`{str(default).lower()}`"
        case list() | tuple():
            return ", ".join(f"`{item}`" for item in default) or "none"
    return f"`{default}`"


def _names(option: Parameter) -> str:
    assert isinstance(option.info, OptionInfo)
    # With Annotated, typer takes the first name as if it were a default.
    declared = [n for n in (option.info.default, *(option.info.param_decls or ())) if isinstance(n, str)]
    names = declared or [f"--{option.name.replace('_', '-')}"]
    kinds = [kind for kind in get_args(option.kind) or (option.kind,) if kind is not type(None)]
    if kinds == [bool]:
        names += [f"--no-{option.name.replace('_', '-')}"] if option.default else []
        return ", ".join(f"`{name}`" for name in names)
    kind = kinds[0]
    if inspect.isclass(kind) and issubclass(kind, StrEnum):
        value = "|".join(kind)
    else:
        value = {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")
    return ", ".join(f"`{name}`" for name in names) + f" `{value}`"


def _option_default(option: Parameter) -> str:
    return "" if option.default in (None, False, True, option.empty) else f"`{option.default}`"


def _family(names: frozenset[str]) -> str:
    """Formats in the order of bits and groups, those of odd widths in short."""

    def key(name: str) -> tuple[str, int]:
        bits, _, size = name.partition("g")
        return bits, int(size or 0)

    bits = {name.partition("g")[0] for name in names}
    if {"w2", "w3", "w5"} <= bits:
        rest = sorted(names - {n for n in names if n[1] in "23567"}, key=key)
        return ", ".join([*(f"`{n}`" for n in rest), "2, 3, 5, 6 and 7 bits"])
    return ", ".join(f"`{name}`" for name in sorted(names, key=key)) or "none"


def _prose(text: str | None) -> str:
    """A docstring as Markdown: RST's double backticks and rich's tags become what they mean here."""
    found = inspect.cleandoc(text or "").replace("``", "`")
    found = re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", found)
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", found)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows), ""]


FILES = {
    "commands.md": commands,
    "recipe.md": recipe_keys,
    "report.md": report_keys,
    "json.md": json_documents,
    "exit-codes.md": exit_codes,
    "formats.md": formats_and_engines,
}

if __name__ == "__main__":
    for name, page in FILES.items():
        (PAGES / name).write_text(page(), "utf-8")
