"""``compressor gate``: what passes, what fails, what the data cannot decide, and what CI systems get to see."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reports import full_report
from typer.testing import CliRunner, Result

from compressor.cli.main import app
from compressor.errors import GateFailed, UsageError
from compressor.recipes import GateRecipe, build_recipe
from compressor.reports.gates import check_gate, check_measured, outcome
from compressor.reports.schema import Estimate
from compressor.reports.write import write_report


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KL 0.0871 [0.083, 0.091], perplexity +5.3 % [4.8, 5.8], top-1 0.8431 without interval, 100 MB."""
    return write_report(full_report(), tmp_path_factory.mktemp("report")).parent


def gate(directory: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(app, ["gate", str(directory), *arguments], standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("option", "passes", "undecided", "fails"),
    [
        ("--max-kl", "0.091", "0.0871", "0.0829"),
        ("--max-ppl-increase", "5.81%", "0.053", "4%"),
        ("--max-bytes", "100MB", None, "99.9MB"),
        ("--min-top1", None, "0.5", None),
    ],
)
def test_the_interval_decides(
    directory: Path, option: str, passes: str | None, undecided: str | None, fails: str | None
) -> None:
    if passes is not None:
        assert gate(directory, option, passes).exit_code == 0
    if undecided is not None:
        with pytest.raises(GateFailed, match=r"more data must decide"):
            gate(directory, option, undecided)
        assert gate(directory, option, undecided, "--on-inconclusive", "pass").exit_code == 0
        warned = gate(directory, option, undecided, "--on-inconclusive", "warn")
        assert warned.exit_code == 0
        assert "warning" in warned.stderr
    if fails is not None:
        with pytest.raises(GateFailed):
            gate(directory, option, fails, "--on-inconclusive", "pass")


@given(
    value=st.floats(-10, 10),
    below=st.floats(0, 5),
    above=st.floats(0, 5),
    threshold=st.floats(-10, 10),
)
def test_outcomes_partition_and_mirror(value: float, below: float, above: float, threshold: float) -> None:
    estimate = Estimate(value=value, low=value - below, high=value + above)
    found = outcome(estimate, threshold, "max")
    assert estimate.low is not None
    assert estimate.high is not None
    assert (found == "pass") == (estimate.high <= threshold)
    assert (found == "fail") == (estimate.low > threshold)
    mirrored = Estimate(value=-value, low=-estimate.high, high=-estimate.low)
    assert outcome(mirrored, -threshold, "min") == found
    assert outcome(Estimate(value=value), threshold, "max") == "inconclusive"


def test_no_gain_does_not_beat_the_control() -> None:
    assert outcome(Estimate(value=0, low=0, high=0), 0, "min", strict=True) == "inconclusive"
    assert outcome(Estimate(value=0, low=0, high=0), 0, "min") == "pass"
    assert outcome(Estimate(value=0.2, low=0.1, high=0.3), 0, "min", strict=True) == "pass"


def test_a_number_that_is_not_there_is_a_usage_error(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"min_speedup: the report has no speed-up over the original"):
        gate(directory, "--min-speedup", "1.5")
    with pytest.raises(UsageError, match="no threshold is given"):
        gate(directory)
    with pytest.raises(UsageError, match="max-bytes"):
        gate(directory, "--max-bytes", "manyMB")
    with pytest.raises(UsageError, match="on-inconclusive"):
        gate(directory, "--max-kl", "1", "--on-inconclusive", "maybe")


def test_a_recipe_names_thresholds_before_work_that_cannot_meet_them(directory: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: x\ngate: {max_kl: 0.05, max_bytes: 120MB}\n")
    with pytest.raises(
        GateFailed, match=r"max_kl: KL.* is 0\.08710 \[0\.08300, 0\.09100\] nats/token, at most 0\.05"
    ):
        gate(directory, "--recipe", str(recipe))
    assert gate(directory, "--recipe", str(recipe), "--max-kl", "0.1").exit_code == 0
    recipe.write_text("model: x\nevaluate: null\ngate: {max_kl: 0.05}\n")
    with pytest.raises(UsageError, match=r"gate\.max_kl: the recipe has no evaluate section"):
        check_measured(build_recipe(recipe, {}))
    recipe.write_text("model: x\ngate:\n  max_kll: 0.05\n")
    with pytest.raises(UsageError, match=r"line 3: gate\.max_kll: unknown key"):
        build_recipe(recipe, {})


def test_what_ci_gets(directory: Path, tmp_path: Path) -> None:
    junit, summary = tmp_path / "out" / "junit.xml", tmp_path / "summary.md"
    summary.write_text("before\n")
    arguments = (
        "--max-kl", "0.05", "--max-bytes", "1GB", "--min-top1", "0.9", "--junit", str(junit),
        "--summary", str(summary), "--annotations",
    )  # fmt: skip
    result = CliRunner().invoke(app, ["gate", str(directory), *arguments], standalone_mode=False)
    assert isinstance(result.exception, GateFailed)
    assert result.exception.exit_code == 3
    errors = [line for line in result.output.splitlines() if line.startswith("::error ")]
    assert len(errors) == 2
    assert re.fullmatch(r"::error file=\S+,title=compressor gate max_kl::KL.*", errors[0])
    assert "84.3 %25" in errors[1]
    suite = ET.parse(junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    failures = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failures == {"max_kl", "min_top1"}
    text = summary.read_text()
    assert text.startswith("before\n## Compression gate failed")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    gate(directory, "--max-bytes", "1GB", "--summary", str(summary))
    assert "Compression gate passed" in summary.read_text(), "summaries of a job's steps follow each other"


def test_json_is_alone_on_standard_output(directory: Path) -> None:
    result = gate(directory, "--max-kl", "0.0871", "--on-inconclusive", "warn", "--json", "--annotations")
    document = json.loads(result.stdout)
    assert document["passed"] is True
    assert document["results"][0]["outcome"] == "inconclusive"
    assert "::warning " in result.stderr


def test_the_report_carries_its_gate() -> None:
    report = full_report()
    found = check_gate(report, GateRecipe(max_kl=0.05))
    assert found is not None
    assert not found.passed
    assert check_gate(report, GateRecipe()) is None
