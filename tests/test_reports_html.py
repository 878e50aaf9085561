"""``report.html``: complete, self-contained, small, and the same bytes for the same report."""

import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from test_reports import full_report, sections

from compressor.recipes import GateRecipe
from compressor.reports.gates import check_gate
from compressor.reports.html import render_html, state
from compressor.reports.markdown import COMMENT_LIMIT, render_markdown
from compressor.reports.schema import (
    Check,
    Estimate,
    Generation,
    Layer,
    Planning,
    PlanPoint,
    Report,
    Scan,
    UnitDamage,
    Verification,
)

_VOID = {"meta", "link", "br", "img", "path", "use", "rect", "circle", "line"}


class _Page(HTMLParser):
    """Collects tags, attributes and text, and complains of tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def rich_report(blocks: int = 4, experts: int = 0) -> Report:
    generator = random.Random(0)
    modules = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"]
    modules += [f"mlp.experts.{i}.up_proj" for i in range(experts)]
    layers = [
        Layer(
            module=f"model.layers.{block}.{name}",
            format="w4g64",
            method="gptq",
            bits=generator.choice([4.25, 8.125]),
            error_before=0.02,
            error_after=generator.lognormvariate(-5, 1),
            notes=["group 128 -> 32: 96 columns"],
        )
        for block in range(blocks)
        for name in modules
    ]
    made: dict[str, Any] = sections()
    quantization = made["quantization"].model_copy(update={"layers": layers})
    kinds, formats = ["qkv", "o", "gate_up", "down"], ["w4g128", "w4g32", "w8"]
    scan = Scan(
        score="fisher",
        unit="ΔKL, nats per token",
        formats=[*formats, "bf16"],
        tokens=8192,
        units=[
            UnitDamage(
                unit=f"model.layers.{block}.{kind}",
                kind=kind,
                block=block,
                damage={name: generator.lognormvariate(-6, 1) for name in formats},
            )
            for block in range(blocks)
            for kind in kinds
        ],
    )
    planning = Planning(
        budget="5bits",
        calibrated=True,
        chosen=PlanPoint(bits=5, bytes=10**8, predicted=0.08),
        frontier=[PlanPoint(bits=4 + i / 4, bytes=10**8, predicted=0.3 * 0.6**i) for i in range(8)],
        measured=[PlanPoint(bits=4.2, bytes=1, predicted=0.28, measured=0.3, stderr=0.02)],
    )
    evaluation = made["evaluation"].model_copy(
        update={
            "generations": [
                Generation(
                    prompt="Once <upon>",
                    baseline=" a time",
                    compressed=" a <script>alert(1)</script>",
                    same_tokens=1,
                    new_tokens=32,
                )
            ]
        }
    )
    report = full_report(quantization=quantization, scan=scan, planning=planning, evaluation=evaluation)
    return report.model_copy(
        update={"gate": check_gate(report, GateRecipe(max_kl=0.1, on_inconclusive="warn"))}
    )


def test_everything_is_on_the_page_and_nothing_comes_from_elsewhere() -> None:
    text = render_html(rich_report())
    page = _Page(text)
    words = " ".join(page.words)
    for expected in (
        "Verified: all 1 checks passed; gate passed", "÷5.38", "+5.3 %", "0.08710", "[0.08300, 0.09100]", "Once <upon>",
        "the first 1 of 32 new tokens agree", "model.layers.3.self_attn.o_proj", "text.txt: 32 of 64 sequences",
        "A processor, 2 threads", "asked for 64 sequences, found 32",
    ):  # fmt: skip
        assert expected in words, expected
    drawings = set(re.findall(r'id="(\w+)-figure_1"', text))
    assert drawings == {"sensitivity", "bits", "errors", "pareto", "predicted"}
    assert "<script" not in text
    for tag, attributes in page.tags:
        assert tag not in {"script", "iframe", "object", "img"}
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "ids of two drawings clash"
    # Words of drawings are words, in the page's own colours.
    assert "bits a weight in the units" in words
    assert "var(--first)" in text
    assert not re.search(r"#01020[3-8]", text)


def test_the_same_report_gives_the_same_bytes() -> None:
    assert render_html(rich_report()) == render_html(rich_report())


def test_a_model_of_thousands_of_modules_stays_small() -> None:
    report = rich_report(blocks=48, experts=128)
    assert report.quantization is not None
    assert len(report.quantization.layers) > 6000
    text = render_html(report)
    assert len(text.encode()) < 1_500_000
    assert "are in report.json" in text
    assert len(render_markdown(report)) <= COMMENT_LIMIT


@pytest.mark.parametrize("present", ["nothing", *sections()])
def test_every_section_stands_alone(present: str) -> None:
    chosen = {name: value if name == present else None for name, value in sections().items()}
    text = render_html(full_report(**chosen, warnings=[]))
    _Page(text)
    assert "None" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)


def test_the_verdict_has_a_colour() -> None:
    report = rich_report()
    assert state(report) == "good"
    failed = Verification(
        passed=False, checks=[Check(name="index", passed=False, detail="shard 2 is absent")]
    )
    assert state(report.model_copy(update={"verification": failed})) == "bad"
    undecided = check_gate(report, GateRecipe(max_kl=0.0871, on_inconclusive="warn"))
    assert state(report.model_copy(update={"gate": undecided})) == "warn"
    assert state(report.model_copy(update={"gate": check_gate(report, GateRecipe(max_kl=0.01))})) == "bad"
    assert state(report.model_copy(update={"gate": None, "verification": None})) == "plain"


def test_markdown_of_endless_text_still_fits_a_comment() -> None:
    report = rich_report()
    text = render_markdown(report.model_copy(update={"warnings": ["x" * 3000] * 100}))
    assert len(text) <= COMMENT_LIMIT
    checks = [Check(name=f"check {i}", passed=True, detail="y" * 900) for i in range(300)]
    text = render_markdown(
        report.model_copy(update={"verification": Verification(passed=True, checks=checks)})
    )
    assert len(text) <= COMMENT_LIMIT
    assert text.count("<details>") == text.count("</details>")


def test_an_estimate_without_interval_reads_well() -> None:
    report = full_report()
    assert report.evaluation is not None
    metric = report.evaluation.metrics["kl"].model_copy(update={"compressed": Estimate(value=0.1)})
    evaluation = report.evaluation.model_copy(update={"metrics": {"kl": metric}})
    assert "95 %:" not in render_html(report.model_copy(update={"evaluation": evaluation}))
