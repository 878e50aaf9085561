"""Units, blocks and plans found from the module graph."""

from pathlib import Path

import pytest
import torch
from conftest import MakeLlama
from transformers import BertConfig, BertModel

from compressor.errors import InputRefused, UsageError
from compressor.formats import parse_format, stored_bytes
from compressor.graph import build_skeleton, discover, load, unload
from compressor.graph.assign import uniform_plan
from compressor.plans import read_plan
from compressor.sources.model import open_model


def test_llama_units_are_what_engines_fuse(tiny_llama_dir: Path) -> None:
    skeleton = build_skeleton(open_model(str(tiny_llama_dir)))
    graph = discover(skeleton)
    assert graph.blocks == ("model.layers.0", "model.layers.1")
    assert [unit.kind for unit in graph.units] == ["qkv", "o", "gate_up", "down"] * 2
    assert [x.name.rpartition(".")[2] for x in graph.units[0].layers] == ["q_proj", "k_proj", "v_proj"]
    assert graph.kept == {"model.embed_tokens": "input embedding", "lm_head": "output embedding"}
    assert skeleton.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert all(p.device.type == "meta" for p in skeleton.module.parameters())


def test_bert_units(tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99
    )
    BertModel(config).save_pretrained(tmp_path)
    graph = discover(build_skeleton(open_model(str(tmp_path))))
    assert [unit.kind for unit in graph.units] == ["qkv", "o", "up", "down"] * 2
    assert graph.kept["pooler.dense"] == "outside the blocks"
    assert graph.head == ""


def test_load_and_unload_touch_one_module(tiny_llama_dir: Path) -> None:
    source = open_model(str(tiny_llama_dir))
    skeleton = build_skeleton(source)
    block = load(skeleton, "model.layers.1", dtype=torch.float32)
    assert all(p.device.type == "cpu" for p in block.parameters())
    other = skeleton.module.get_submodule("model.layers.0")
    assert all(p.device.type == "meta" for p in other.parameters())
    unload(block)
    assert all(p.device.type == "meta" for p in skeleton.module.parameters())


def test_plan_bytes_are_those_of_the_formats(make_llama: MakeLlama) -> None:
    skeleton = build_skeleton(open_model(str(make_llama(tie_word_embeddings=False))))
    graph = discover(skeleton)
    plan = uniform_plan(skeleton, graph, parse_format("w4g32"))
    for layer in graph.layers:
        expected = stored_bytes(parse_format("w4g32"), layer.out_features, layer.in_features, 4)
        assert plan.layers[layer.name].bytes == expected
    assert plan.layers["lm_head"].bytes == skeleton.stored["lm_head.weight"].nbytes
    assert set(plan.kept()) == {"lm_head", "model.embed_tokens"}


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=32, num_hidden_layers=0, num_attention_heads=2, intermediate_size=64, vocab_size=99
    )
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputRefused, match="no stack of blocks"):
        discover(build_skeleton(open_model(str(tmp_path))))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: m\nlayers:\n  a: {format: w4g32}\n  b: {format: w4g48}\n", ["line 4", "layer b", "w4g48"]),
        ("model: m\nlayers:\n  a: {format: w4g32, bits: 3}\n", ["line 3", "layers.a.bits"]),
        ("model: m\nlayer: {}\n", ["line 1"]),
        ("- a\n", ["line 1"]),
        ("a: [\n", ["not valid YAML"]),
    ],
)
def test_a_wrong_plan_names_file_line_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read_plan(file)
    assert str(file) in str(error.value)
    for word in words:
        assert word in str(error.value)
