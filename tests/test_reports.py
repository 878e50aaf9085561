"""The report: its schema, the JSON and Markdown it becomes, and what the terminal shows."""

import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema import ValidationError as SchemaError
from pydantic import ValidationError
from rich.console import Console

from compressor.cli.documents import SCHEMAS
from compressor.errors import InputRefused, UsageError
from compressor.reports import wording
from compressor.reports.markdown import render_markdown
from compressor.reports.schema import (
    Check,
    Coverage,
    Data,
    Environment,
    Estimate,
    Evaluation,
    Layer,
    Metric,
    Model,
    Quantization,
    Report,
    Tool,
    Verification,
    WeightFile,
)
from compressor.reports.terminal import print_report
from compressor.reports.write import read_report, report_json, write_report

SECTIONS = ("source", "artifact", "coverage", "quantization", "evaluation", "verification")


def tool() -> Tool:
    environment = Environment(
        versions={"compressor": "0.1.0", "torch": "2.13.0"},
        platform="Linux",
        device="cpu",
        device_name="A processor",
        threads=2,
        memory_bytes=24_000_000_000,
    )
    return Tool(
        version="0.1.0",
        command="evaluate",
        arguments={"data": "text.txt", "samples": 32},
        seed=0,
        created="2026-01-01T00:00:00+00:00",
        seconds=12.5,
        environment=environment,
    )


def model(size: int, quantization: str | None) -> Model:
    return Model(
        ref="org/model",
        path="models/x",
        architecture="LlamaForCausalLM",
        quantization=quantization,
        bytes=size,
        parameters=134_515_008,
        bits_per_weight=8 * size / 134_515_008,
        files=[WeightFile(name="model.safetensors", bytes=size, header_sha256="0" * 64)],
    )


def data() -> Data:
    return Data(
        source="text.txt",
        rows_read=40,
        rows_used=33,
        rows_dropped=7,
        rows_truncated=1,
        sequences=32,
        tokens=16384,
        requested=64,
        sequence_length=512,
        packing="concat",
        bos="none",
        sha256="a" * 64,
    )


def layer(i: int, error: float | None = 0.5) -> Layer:
    return Layer(
        module=f"model.layers.{i}.mlp.down_proj",
        unit=f"layers.{i}.down",
        format="int4-g32",
        method="gptq" if error is not None else None,
        bits=4.5,
        error_before=None if error is None else 2 * error,
        error_after=error,
        seconds=0.25,
        skipped=None if error is not None else "kept by --ignore",
        notes=["group 128 -> 32: 96 columns"],
    )


def sections(layers: int = 8) -> dict[str, Any]:
    metrics = {
        "perplexity": Metric(
            unit="",
            better="lower",
            baseline=Estimate(value=24.8812, low=23.0, high=26.9),
            compressed=Estimate(value=26.2101, low=24.3, high=28.2),
            change=Estimate(value=1.3289, low=1.1, high=1.5),
            ratio=Estimate(value=1.05341, low=1.048, high=1.058),
        ),
        "kl": Metric(
            unit="nats/token",
            better="lower",
            compressed=Estimate(value=0.0871, low=0.083, high=0.091),
            quantiles={"p50": 0.03, "p95": 0.31, "p99": 0.7, "max": 4.2},
        ),
        "top1_agreement": Metric(unit="fraction", better="higher", compressed=Estimate(value=0.8431)),
    }
    return {
        "source": model(538_090_408, None),
        "artifact": model(100_000_000, "compressed-tensors"),
        "coverage": Coverage(quantized_parameters=9, eligible_parameters=10, fraction=0.9),
        "quantization": Quantization(
            scheme="w4a16-g32",
            method="gptq",
            error_unit="relative output error",
            seconds=200.0,
            calibration=data(),
            layers=[layer(i, error=0.01 * i) for i in range(layers - 1)] + [layer(layers - 1, error=None)],
        ),
        "evaluation": Evaluation(
            task="causal-lm",
            metrics=metrics,
            data=data(),
            window=512,
            stride=512,
            sequences=32,
            tokens=16352,
            batch_size=4,
            dtype="float32",
            device="cpu",
            confidence=0.95,
            resamples=2000,
            seed=0,
            seconds=60.0,
            notes=["7 sequences are few"],
        ),
        "verification": Verification(
            passed=True, checks=[Check(name="tensors", passed=True, detail="210 tensors")]
        ),
    }


def full_report(**changes: Any) -> Report:
    return Report(tool=tool(), **(sections() | {"warnings": ["asked for 64 sequences, found 32"]} | changes))


def test_json_round_trips_exactly_and_keeps_floats(tmp_path: Path) -> None:
    report = full_report()
    file = write_report(report, tmp_path / "out")
    assert read_report(tmp_path / "out") == read_report(file) == report
    document = json.loads(file.read_text())
    assert document["evaluation"]["metrics"]["perplexity"]["baseline"]["value"] == 24.8812
    assert list(document) == list(Report.model_fields)
    assert report_json(report) == file.read_text()


def test_json_satisfies_the_published_schema() -> None:
    schema = Draft202012Validator(json.loads((SCHEMAS / "report.schema.json").read_text("utf-8")))
    schema.validate(json.loads(report_json(full_report())))
    for spoil in (
        lambda d: d.update(extra=1),
        lambda d: d.update(schema_version="9.9"),
        lambda d: d["evaluation"]["metrics"]["kl"].pop("compressed"),
        lambda d: d["evaluation"]["metrics"]["kl"]["compressed"].update(value="low"),
        lambda d: d["tool"].pop("environment"),
    ):
        broken = json.loads(report_json(full_report()))
        spoil(broken)
        with pytest.raises(SchemaError):
            schema.validate(broken)


def test_unknown_keys_and_non_finite_numbers_are_refused() -> None:
    with pytest.raises(ValidationError, match="extra"):
        Estimate(value=1.0, median=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="finite"):
        Estimate(value=float("nan"))


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=len(SECTIONS))))
def test_markdown_and_terminal_render_every_combination_of_sections(present: tuple[bool, ...]) -> None:
    chosen = {name: value for (name, value), use in zip(sections().items(), present, strict=True) if use}
    report = Report(tool=tool(), **chosen)
    text = render_markdown(report)
    assert text.startswith("## compressor evaluate\n")
    assert text.count("<details>") == text.count("</details>")
    assert "None" not in text
    assert ("26.21" in text) == ("evaluation" in chosen)
    assert ("7 sequences are few" in text) == ("evaluation" in chosen)
    assert ("down_proj" in text) == ("quantization" in chosen)
    assert ("210 tensors" in text) == ("verification" in chosen)
    for row in re.findall(r"^\|.*$", text, re.MULTILINE):
        assert row.endswith("|")
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=160))
    shown = stream.getvalue()
    assert ("KL(original" in shown) == ("evaluation" in chosen)
    assert ("bits per weight" in shown) == ("artifact" in chosen)


def test_markdown_tables_are_well_formed() -> None:
    """Every table: a header, a rule and rows of one width, with a blank line before (or GitHub shows raw pipes)."""
    text = render_markdown(full_report())
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(blocks) == 5
    for block in blocks:
        rows = block.splitlines()
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(widths) == 1, block
        assert set(rows[1]) <= set("|-:"), block
        before = text[: text.index(block)]
        assert before.endswith("\n\n"), block


def test_headline_states_verdict_size_and_loss() -> None:
    line = wording.headline(full_report())
    assert line == (
        "Verified (checks: 1) · 5.38× smaller (538.1 MB → 100.0 MB, 5.95 bits/weight) · "
        "KL 0.08710 [0.08300, 0.09100] nats/token · perplexity 24.88 → 26.21 (+5.3 % [+4.8 %, +5.8 %]) · top-1 agreement 84.3 %"
    )
    failed = Verification(
        passed=False, checks=[Check(name="index", passed=False, detail="shard 2 is absent")]
    )
    report = full_report(verification=failed)
    assert wording.headline(report).startswith("VERIFICATION FAILED (index)")
    assert "- index: shard 2 is absent" in render_markdown(report)


def test_markdown_fits_a_comment_and_says_what_it_left_out() -> None:
    report = Report(tool=tool(), **sections(layers=2000))
    text = render_markdown(report)
    assert len(text) < 65_536
    assert "The other 1850 are in report.json." in text
    worst = text.index("Layers with the largest error")
    assert text.index("model.layers.1998.mlp") > worst


def test_worst_layers_are_sorted_and_unmeasured_ones_left_out() -> None:
    layers = [layer(0, 0.1), layer(1, None), layer(2, 0.3), layer(3, 0.2)]
    assert [item.module for item in wording.worst_layers(layers, 2)] == [layers[2].module, layers[3].module]
    assert len(wording.worst_layers(layers)) == 3


def test_text_from_outside_cannot_break_the_page() -> None:
    text = render_markdown(full_report(warnings=["a|b\n<script>alert(1)</script> `x`"]))
    assert "<script>" not in text
    assert "- a\\|b &lt;script>alert(1)&lt;/script> 'x'" in text
    stream = io.StringIO()
    print_report(full_report(warnings=["column [bold]x[/bold]"]), Console(file=stream, width=160))
    assert "column [bold]x[/bold]" in stream.getvalue()


def test_writing_is_atomic_and_refuses_to_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(full_report(), tmp_path)
    before = (tmp_path / "report.json").read_text()
    with pytest.raises(UsageError, match="--overwrite"):
        write_report(full_report(), tmp_path)

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(Exception, match="No space left"):
        write_report(full_report(warnings=[]), tmp_path, overwrite=True)
    assert (tmp_path / "report.json").read_text() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


def test_reading_a_bad_report_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with pytest.raises(InputRefused, match=r"report\.json: cannot be read"):
        read_report(tmp_path)
    document = json.loads(report_json(full_report()))
    document["tool"]["seed"] = "many"
    file.write_text(json.dumps(document))
    with pytest.raises(InputRefused, match=r"report\.json: .*tool\.seed"):
        read_report(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (26.2101, "26.21"),
        (12345.6, "12,346"),
        (0.0, "0"),
        (1.53e-5, "1.5e-05"),
        (0.08713, "0.08713"),
        (999.96, "1000"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.34, "12.3 s"), (245.0, "4 min 05 s"), (7380.0, "2 h 03 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text
