"""What every command prints with ``--json`` is a document of its published schema."""

import json
from pathlib import Path

import pytest
from conftest import Run
from jsonschema import Draft202012Validator

from compressor.cli.documents import DOCUMENTS, SCHEMAS, schema_json

DATA = ["--samples", "4", "--sequence-length", "32"]


def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_schema_files_are_those_of_the_models(name: str) -> None:
    assert (SCHEMAS / f"{name}.schema.json").read_text("utf-8") == schema_json(name), (
        "python -m compressor.cli.documents"
    )


def test_no_other_schema_is_published() -> None:
    assert {file.name for file in SCHEMAS.iterdir()} == {f"{name}.schema.json" for name in DOCUMENTS}


def test_every_command_prints_what_its_schema_says(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    model, text = tiny_llama_dir, tmp_path / "text.txt"
    text.write_text("\n".join(f"the quick fox number {i} jumps over dog {i * 7 % 13}" for i in range(300)))
    data = ["--data", text, *DATA]
    scan, checkpoint, report = tmp_path / "s.json", tmp_path / "q", tmp_path / "report"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {model}\nquantize: {{scheme: w4g32, method: rtn}}\nverify: {{engine: null}}\n"
        f"evaluate: {{data: {text}, samples: 4, sequence_length: 32}}\n"
    )

    def check(schema: str, *arguments: object, expected: int = 0) -> None:
        code, printed, stderr = run(*arguments, "--json")
        assert code == expected, stderr
        errors = [error.message for error in validator(schema).iter_errors(json.loads(printed))]
        assert not errors, (schema, errors)

    check("inspect", "inspect", model)
    scanning = ["scan-sensitivity", model, "-o", scan, "-f", "w4g32,w8,bf16", *data]
    check("dry-run", *scanning, "--dry-run")
    check("scan-sensitivity", *scanning)
    planning = ["plan", scan, "--budget", "6bits", "-o", tmp_path / "plan.yaml", "--measure", "2"]
    check("plan", *planning, "--dry-run")
    check("plan", *planning)
    quantizing = ["quantize", model, "-o", checkpoint, "--scheme", "w4g32", "--method", "rtn"]
    check("dry-run", *quantizing, "--dry-run")
    check("quantize", *quantizing)
    check("inspect", "inspect", checkpoint)
    check("verify", "verify", checkpoint, "--source", model)
    evaluating = ["evaluate", checkpoint, "--baseline", model, "-o", report, *data]
    check("dry-run", *evaluating, "--dry-run")
    check("report", *evaluating)
    check("gate", "gate", report, "--max-kl", "100")
    check("gate", "gate", report, "--max-kl", "0", "--annotations", expected=3)
    diagnosing = ["diagnose", model, checkpoint, "--try", "1", "--iterations", "2", *data]
    check("dry-run", *diagnosing, "--dry-run")
    check("diagnosis", *diagnosing)
    teaching = ["distill", model, "--student", "derive:layers=1", "--data", text, "--length", "32"]
    teaching += ["--steps", "2", "--batch-size", "2", "--evaluate-samples", "4", "--test-samples", "4"]
    check("dry-run", *teaching, "-o", tmp_path / "student", "--dry-run")
    check("distill-cache", *teaching, "--cache", tmp_path / "cache", "--cache-only")
    check("report", *teaching, "-o", tmp_path / "student", "--track", "none")
    check("dry-run", "run", recipe, "-o", tmp_path / "run", "--dry-run")
    check("report", "run", recipe, "-o", tmp_path / "run")

    errors = list(validator("sensitivity").iter_errors(json.loads(scan.read_text("utf-8"))))
    assert not errors
