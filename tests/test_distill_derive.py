"""Derived students: ordinary checkpoints whose kept parts are the teacher's, for every kind of architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from compressor.distillation.derive import (
    Request,
    build,
    derive,
    kept_layers,
    layer_kl,
    measure_importance,
    parse_request,
    stacks_of,
)
from compressor.distillation.tasks import Batch
from compressor.errors import UsageError


def _llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(config | changes))).eval()


def _lm_batch(vocabulary: int = 64) -> Batch:
    ids = torch.randint(4, vocabulary, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    where = mask.bool() & torch.cat([mask[:, 1:], torch.zeros(3, 1)], 1).bool()
    labels = torch.roll(ids, -1, 1)[where]
    counts = tuple(where.sum(1).tolist())
    return Batch({"input_ids": ids, "attention_mask": mask}, labels, counts, ("a", "b", "c"), where=where)


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("layers=6", Request(layers=(6,))),
        ("layers=12+3,score=kl", Request(layers=(12, 3), score="kl")),
        ("params=50%", Request(parameters=0.5)),
        ("params=62.5%,axes=depth+ffn+heads", Request(parameters=0.625, axes=("depth", "ffn", "heads"))),
    ],
)
def test_requests(text: str, request_: Request) -> None:
    assert parse_request(text) == request_


@pytest.mark.parametrize("text", ["", "layers=0", "layers=2,params=5%", "params=120%", "params=.5", "width=3", "layers=3,axes=ffn"])  # fmt: skip
def test_bad_requests_say_so(text: str) -> None:
    with pytest.raises(UsageError, match="derive:"):
        parse_request(text)


def test_a_layer_that_does_nothing_is_left_out_first() -> None:
    model = _llama()
    idle = model.model.layers[3]
    idle.self_attn.o_proj.weight.data.zero_()
    idle.mlp.down_proj.weight.data.zero_()
    batch = _lm_batch()
    importance = measure_importance(model, [batch])
    scores = importance.influence["model.layers"]
    assert scores[3] == pytest.approx(0, abs=1e-6)
    assert min(s for i, s in enumerate(scores) if i != 3) > 1e-3
    model.config.use_cache = False
    kl = layer_kl(model, "causal-lm", [batch], stacks_of(model)[0])
    assert kl[3] == pytest.approx(0, abs=1e-6)
    assert model.config.num_hidden_layers == 6
    student, derived = derive(model, Request(layers=(5,)), [batch], "causal-lm")
    assert derived.layers == {"model.layers": [0, 1, 2, 4, 5]}
    assert derived.kl == pytest.approx(0, abs=1e-6)
    assert [layer.self_attn.layer_idx for layer in student.model.layers] == [0, 1, 2, 3, 4]


def test_influence_ignores_padding() -> None:
    model, batch = _llama(), _lm_batch()
    changed = batch.inputs["input_ids"].clone()
    changed[1, 7:] = 9
    other = Batch(
        {**batch.inputs, "input_ids": changed}, batch.labels, batch.counts, batch.keys, where=batch.where
    )
    a, b = (measure_importance(model, [x]) for x in (batch, other))
    assert a.influence["model.layers"] == pytest.approx(b.influence["model.layers"], rel=1e-5)
    torch.testing.assert_close(a.neurons["model.layers.0"], b.neurons["model.layers.0"])


def test_idle_neurons_and_groups_are_left_out_without_loss() -> None:
    model = _llama()
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[:, 64:192] = 0
        layer.mlp.up_proj.weight.data[64:192] = 0
        layer.self_attn.v_proj.weight.data[16:32] = 0  # KV groups 2 and 3 of 4, head_dim 8
    batch = _lm_batch()
    importance = measure_importance(model, [batch])
    layers = {"model.layers": list(range(6))}
    student = build(model, layers, importance, 0.5, 0.5)
    assert (
        student.config.intermediate_size,
        student.config.num_key_value_heads,
        student.config.num_attention_heads,
    ) == (128, 2, 4)
    assert student.config.head_dim == 8
    torch.testing.assert_close(
        student(**batch.inputs).logits[batch.where],
        model(**batch.inputs).logits[batch.where],
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("axes", [("depth",), ("ffn",), ("depth", "ffn"), ("depth", "ffn", "heads")])
def test_parameter_share_is_met(axes: Any, tmp_path: Path) -> None:
    model, batch = _llama(intermediate_size=2048, num_hidden_layers=8), _lm_batch()
    student, derived = derive(model, Request(parameters=0.75, axes=axes), [batch], "causal-lm")
    assert derived.parameters / derived.teacher_parameters == pytest.approx(0.75, abs=0.05)
    assert derived.kl is not None
    student.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(again(**batch.inputs).logits, student(**batch.inputs).logits)


def _qwen() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, use_sliding_window=True, sliding_window=4, max_window_layers=2,
        )
    ).eval()  # fmt: skip


def _gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64)).eval()


def test_per_layer_lists_follow_their_layers(tmp_path: Path) -> None:
    model, batch = _qwen(), _lm_batch()
    types = model.config.layer_types
    layers = {"model.layers": [0, 2, 3]}
    student = build(model, layers, measure_importance(model, [batch]), 1.0, 1.0)
    assert student.config.layer_types == [types[0], types[2], types[3]]
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**batch.inputs).logits, student(**batch.inputs).logits)


def test_gpt2_with_its_transposed_layers() -> None:
    model, batch = _gpt2(), _lm_batch()
    student, derived = derive(model, Request(parameters=0.7), [batch], "causal-lm")
    assert derived.parameters < 0.73 * derived.teacher_parameters
    assert student(**batch.inputs).logits.shape == (3, 12, 64)


def test_encoder_and_encoder_decoders() -> None:
    torch.manual_seed(0)
    bert = BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128, num_labels=3)
    ).eval()  # fmt: skip
    batch = _lm_batch()
    labels = Batch(batch.inputs, torch.tensor([0, 1, 2]), (1, 1, 1), ("a", "b", "c"))
    student, derived = derive(bert, Request(layers=(2,)), [labels], "classification")
    assert len(derived.layers["bert.encoder.layer"]) == 2
    kept = derived.layers["bert.encoder.layer"][-1]
    torch.testing.assert_close(
        student.bert.encoder.layer[1].intermediate.dense.weight,
        bert.bert.encoder.layer[kept].intermediate.dense.weight,
    )
    narrow, _ = derive(bert, Request(parameters=0.75, axes=("ffn",)), [labels], "classification")
    assert narrow.config.intermediate_size < 128

    both = {
        "t5": T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=0)
        ),
        "bart": BartForConditionalGeneration(
            BartConfig(vocab_size=64, d_model=32, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
                       decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64)
        ),
    }  # fmt: skip
    inputs = {**batch.inputs, "decoder_input_ids": batch.inputs["input_ids"]}
    pairs = Batch(inputs, batch.labels, batch.counts, batch.keys, where=batch.where)
    for model in both.values():
        student, derived = derive(model.eval(), Request(layers=(2,)), [pairs], "seq2seq")
        assert sorted(len(kept) for kept in derived.layers.values()) == [2, 4]  # the decoder is what is cut
        assert student(**inputs).logits.shape == (3, 12, 64)


def test_kept_layers() -> None:
    assert kept_layers([9, 1, 5, 3, 0], 4) == [0, 2, 3, 4]
    assert kept_layers([9, 1, 5], 1) == [0]
    with pytest.raises(UsageError, match="has 3 layers"):
        kept_layers([1, 2, 3], 4)


def test_more_layers_than_there_are_is_one_line() -> None:
    with pytest.raises(UsageError, match="the teacher has 6 layers"):
        derive(_llama(), Request(layers=(9,)), [_lm_batch()], "causal-lm")
