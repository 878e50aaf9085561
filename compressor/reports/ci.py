"""Gates for continuous integration: JUnit XML, a step summary in Markdown, and annotations of a log."""

import xml.etree.ElementTree as ET
from pathlib import Path

from compressor.errors import MachineLimit
from compressor.reports import wording
from compressor.reports.gates import blocking, sentence, shown
from compressor.reports.markdown import cell
from compressor.reports.schema import Estimate, Gate, GateResult, Report
from compressor.reports.write import write_atomically

_MARKS = {"pass": "✅ pass", "fail": "❌ fail", "inconclusive": "❔ inconclusive"}


def junit_xml(gate: Gate, report: Report, file: str) -> str:
    """One test case a threshold. A threshold that does not decide is a failure or passes, as the gate says; its
    reason is in the case's output either way."""
    failing = {result.name for result in blocking(gate)}
    suite = ET.Element(
        "testsuite",
        name="compressor gate",
        tests=str(len(gate.results)),
        failures=str(len(failing)),
        errors="0",
        skipped="0",
        time="0",
    )
    properties = ET.SubElement(suite, "properties")
    ET.SubElement(properties, "property", name="report", value=_xml(file))
    ET.SubElement(properties, "property", name="headline", value=_xml(wording.headline(report)))
    for result in gate.results:
        case = ET.SubElement(suite, "testcase", classname="compressor.gate", name=result.name, time="0")
        if result.name in failing:
            ET.SubElement(case, "failure", type=result.outcome, message=_xml(sentence(result)))
        ET.SubElement(case, "system-out").text = _xml(f"{result.outcome}: {sentence(result)}")
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def step_summary(gate: Gate, report: Report) -> str:
    """A heading with the verdict and a table, in GitHub's Markdown."""
    lines = [
        f"## Compression gate {'passed' if gate.passed else 'failed'}",
        "",
        cell(wording.headline(report.model_copy(update={"gate": None}))),
        "",
        "| | measured, with 95 % interval | asked for | |",
        "|---|---:|---:|---|",
    ]
    for result in gate.results:
        bound = "≤" if result.limit == "max" else ">" if result.name == "beat_control" else "≥"
        lines.append(
            f"| {cell(result.label)} | {shown(result, result.value)} | "
            f"{bound} {shown(result, Estimate(value=result.threshold))} | {_MARKS[result.outcome]} |"
        )
    if any(result.outcome == "inconclusive" for result in gate.results):
        lines += [
            "",
            f"Inconclusive: the threshold lies inside the interval. Here that counts as {gate.on_inconclusive}; "
            "more evaluation data narrows the interval.",
        ]
    return "\n".join(lines) + "\n\n"


def annotations(gate: Gate, file: str) -> list[str]:
    """``::error`` for what fails the gate and ``::warning`` for what was left undecided, a line each."""
    failing = {result.name for result in blocking(gate)}
    lines = []
    for result in gate.results:
        if result.name in failing or (result.outcome == "inconclusive" and gate.on_inconclusive == "warn"):
            lines.append(_annotation("error" if result.name in failing else "warning", result, file))
    return lines


def write_junit(gate: Gate, report: Report, source: str, file: Path) -> None:
    """Write ``file``, replacing it. Raises MachineLimit when the disk refuses."""
    document = f'<?xml version="1.0" encoding="utf-8"?>\n{junit_xml(gate, report, source)}'
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, document)
    except OSError as error:
        raise MachineLimit(f"{file}: cannot be written ({error.strerror})") from None


def append_summary(gate: Gate, report: Report, file: Path) -> None:
    """Append to ``file``: CI systems collect the summaries of a job's steps there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(step_summary(gate, report))
    except OSError as error:
        raise MachineLimit(f"{file}: cannot be written ({error.strerror})") from None


def _annotation(level: str, result: GateResult, file: str) -> str:
    # The characters that end a property or a command have escapes of their own.
    text = sentence(result).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    path = file.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    path = path.replace(":", "%3A").replace(",", "%2C")
    return f"::{level} file={path},title=compressor gate {result.name}::{text}"


def _xml(text: str) -> str:
    """``text`` without the control characters that XML cannot hold."""
    return "".join(c for c in text if c in "\t\n" or ord(c) >= 32)
