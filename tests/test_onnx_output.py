"""``quantize --format onnx``: written, run by ONNX Runtime, close to torch; refused by name what is no encoder."""

import json
from pathlib import Path
from unittest.mock import patch

import numpy
import pytest
import torch
from architectures import save_family
from cli import run_here
from conftest import MakeLlama
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    BertModel,
)

from compressor.pipelines import onnx as pipeline
from compressor.sources.model import Source

onnx = pytest.importorskip("onnx", reason="pip install 'compressor[onnx]'")
for package in ("onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason="pip install 'compressor[onnx]'")

_BERT = BertConfig(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2
)  # fmt: skip


def _run(file: Path, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    known = {x.name for x in session.get_inputs()}
    answers = session.run(None, {name: value.numpy() for name, value in inputs.items() if name in known})
    return {
        name: torch.from_numpy(numpy.asarray(answer)) for name, answer in zip(names, answers, strict=True)
    }


@pytest.mark.parametrize("family", ["bert", "roberta", "deberta_v2", "distilbert", "modernbert"])
def test_a_classifier_answers_as_it_did(family: str, tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", family)
    code, out, err = run_here("quantize", source, "-o", tmp_path / "q", "--format", "onnx", "--json")
    assert code == 0, err
    assert all(check["passed"] for check in json.loads(out)["checks"])
    assert "the same class" in out
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "q" / name).read_bytes() == (source / name).read_bytes()
    assert not list((tmp_path / "q").glob("*.safetensors"))
    assert b"site-packages" not in (tmp_path / "q/model.onnx").read_bytes()  # where torch traced it

    ids = torch.randint(3, 300, (5, 23), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    model = AutoModelForSequenceClassification.from_pretrained(source).eval()
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits
    found = _run(tmp_path / "q/model.onnx", inputs)["logits"]
    assert (found - wanted).abs().max() < 0.5 * wanted.std()


@pytest.mark.parametrize(
    ("made", "auto", "names"),
    [
        (BertModel, AutoModel, ["last_hidden_state", "pooler_output"]),
        (BertForTokenClassification, AutoModelForTokenClassification, ["logits"]),
        (BertForQuestionAnswering, AutoModelForQuestionAnswering, ["start_logits", "end_logits"]),
    ],
)
def test_outputs_have_the_names_of_transformers(
    made: type, auto: type, names: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made(_BERT).save_pretrained(tmp_path / "model")
    code, _, err = run_here("quantize", tmp_path / "model", "-o", tmp_path / "q", "--format", "onnx")
    assert code == 0, err
    ids = torch.randint(0, 320, (1, 9), generator=torch.Generator().manual_seed(1))
    types = (torch.arange(9) > 4).long()[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": types}
    with torch.no_grad():
        wanted = auto.from_pretrained(tmp_path / "model").eval()(**inputs)  # type: ignore[attr-defined]
    found = _run(tmp_path / "q/model.onnx", inputs)
    assert list(found) == names
    for name in names:
        assert (found[name] - wanted[name]).norm() < 0.2 * wanted[name].norm()


def test_nothing_is_left_of_a_file_that_answers_otherwise(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "distilbert")
    quantize = pipeline._quantize

    def spoiled(exported: Path, file: Path, opened: Source) -> None:
        quantize(exported, file, opened)
        model = onnx.load(str(file))
        scales = [
            x for x in model.graph.initializer if x.name.startswith("val_") and x.name.endswith("_scale")
        ]
        for scale in scales:
            scale.CopyFrom(onnx.numpy_helper.from_array(3 * onnx.numpy_helper.to_array(scale), scale.name))
        onnx.save(model, str(file))

    with patch.object(pipeline, "_quantize", spoiled):
        code, _, err = run_here("quantize", source, "-o", tmp_path / "q", "--format", "onnx")
    assert code == 4, err
    assert "INT8 outputs: logits: off by" in err
    assert {path.name for path in tmp_path.iterdir()} == {"model", "q.rejected"}


def test_a_failed_export_is_one_line(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "distilbert")
    with patch("torch.onnx.export", side_effect=RuntimeError("no such operator\nand more")):
        code, _, err = run_here("quantize", source, "-o", tmp_path / "q", "--format", "onnx")
    assert code == 5
    assert "cannot export it to ONNX (no such operator)" in err
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = save_family(tmp_path / "model", "bert")
    options = ("--format", "onnx", "--scheme", "int8", "--dry-run", "--json")
    code, out, err = run_here("quantize", source, "-o", tmp_path / "q", *options)
    assert code == 0, err
    assert json.loads(out)["format"] == "onnx"
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize(
    ("family", "options", "code", "words"),
    [
        ("bert", ("--method", "gptq"), 2, "method: --format onnx cannot express it"),
        ("bert", ("--ignore", "classifier"), 2, "ignore: --format onnx cannot express it"),
        ("bert", ("--scheme", "nf4"), 2, "nf4: format onnx has int8"),
        ("bert", ("--verify-engine", "vllm"), 2, "stock vLLM does not load onnx"),
        ("bert", ("--device", "cuda"), 2, "--device cuda"),
        ("bert_mlm", (), 5, "BertForMaskedLM"),
        ("llama", (), 5, "LlamaForCausalLM"),
        ("t5", (), 5, "T5ForConditionalGeneration"),
        ("bart", (), 5, "BartForConditionalGeneration"),
        ("llava", (), 5, "LlavaForConditionalGeneration"),
        ("whisper", (), 5, "WhisperForConditionalGeneration"),
    ],
)
def test_what_it_cannot_express_is_refused(
    family: str, options: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    source = save_family(tmp_path / "model", family)
    found, _, err = run_here("quantize", source, "-o", tmp_path / "q", "--format", "onnx", *options)
    assert found == code, err
    assert words in err
    assert not (tmp_path / "q").exists()


def test_a_decoder_by_its_config_is_refused(tmp_path: Path) -> None:
    BertModel(BertConfig(**{**_BERT.to_dict(), "is_decoder": True})).save_pretrained(tmp_path / "model")
    code, _, err = run_here("quantize", tmp_path / "model", "-o", tmp_path / "q", "--format", "onnx")
    assert code == 5, err
    assert "BertModel" in err


def test_a_missing_package_names_the_extra(tmp_path: Path) -> None:
    with patch("compressor.pipelines.other_format.find_spec", return_value=None):
        code, _, err = run_here("quantize", "builtin", "-o", tmp_path / "q", "--format", "onnx")
    assert code == 6
    assert "pip install 'compressor[onnx]'" in err


def test_gguf_names_what_makes_it(tmp_path: Path, make_llama: MakeLlama) -> None:
    code, _, err = run_here("quantize", make_llama(), "-o", tmp_path / "q", "--format", "gguf")
    assert code == 2
    assert "convert_hf_to_gguf.py" in err
    assert "llama-quantize" in err
    assert err.strip().count("\n") == 0
