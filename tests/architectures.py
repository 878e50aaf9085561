"""Tiny random models of every family, saved as a user would find them: config, safetensors, tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from conftest import make_tokenizer
from transformers import PreTrainedModel

VOCABULARY = 320
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    **_SPECIAL,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """``model`` and ``config`` are class names in transformers; ``settings`` makes a tiny instance.

    ``kind`` is what the model is for: causal, encoder or seq2seq. ``floor`` is the coverage that it must reach; what is
    below 99 % has a reason in ``why``, which the checkpoint has to list for the largest matrix left out.
    """

    model: str
    config: str
    settings: dict[str, Any]
    kind: str = "causal"
    floor: float = 0.99
    why: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


def _llama(name: str, *, drop: tuple[str, ...] = (), **changes: Any) -> Family:
    settings = {k: v for k, v in (_LLAMA | changes).items() if k not in drop}
    return Family(f"{name}ForCausalLM", f"{name}Config", settings)


_MOE = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

FAMILIES: dict[str, Family] = {
    "llama": _llama("Llama", tie_word_embeddings=True),
    "qwen2": _llama("Qwen2", drop=("head_dim",)),
    "qwen3": _llama("Qwen3"),
    "mistral": _llama("Mistral", sliding_window=16),
    "gemma2": _llama("Gemma2", sliding_window=16, query_pre_attn_scalar=16, num_hidden_layers=2),
    "gemma3": _llama("Gemma3", sliding_window=16, query_pre_attn_scalar=16, num_hidden_layers=2)
    and Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _LLAMA | {"sliding_window": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
    "phi3": _llama("Phi3", drop=("head_dim",), original_max_position_embeddings=256),
    "falcon": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_hidden_size": 96,
            "multi_query": True,
            "parallel_attn": True,
            "initializer_range": 0.2,
            "max_position_embeddings": 256,
            **_SPECIAL,
        },
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 96,
            "n_positions": 256,
            "initializer_range": 0.2,
            **_SPECIAL,
        },
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
            "init_std": 0.2,
            **_SPECIAL,
        },
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_BERT, **_SPECIAL}),
    "cohere": _llama("Cohere", drop=("head_dim",)),
    "olmo2": _llama("Olmo2", drop=("head_dim",)),
    "smollm3": _llama("SmolLM3", drop=("head_dim",), no_rope_layer_interval=2, num_hidden_layers=2),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {k: v for k, v in _LLAMA.items() if k != "head_dim"}
        | _MOE
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
        floor=0.98,
        why="router",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
        floor=0.98,
        why="router",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _LLAMA | _MOE | {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
        floor=0.98,
        why="router",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "time_step_rank": 8,
            "initializer_range": 0.2,
            **_SPECIAL,
        },
        floor=0.85,
        why="state space",
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "initializer_range": 0.2,
            **_SPECIAL,
        },
        floor=0.95,
        why="state space",
    ),
    "jamba": Family(
        "JambaForCausalLM",
        "JambaConfig",
        {k: v for k, v in _LLAMA.items() if k != "head_dim"}
        | {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        floor=0.9,
        why="state space",
    ),
    "bamba": Family(
        "BambaForCausalLM",
        "BambaConfig",
        {k: v for k, v in _LLAMA.items() if k != "head_dim"}
        | {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
        floor=0.95,
        why="state space",
    ),
    "bert": Family(
        "BertForSequenceClassification", "BertConfig", _BERT, "encoder", floor=0.9, why="outside the blocks"
    ),
    "bert_mlm": Family(
        "BertForMaskedLM", "BertConfig", _BERT, "encoder", floor=0.9, why="outside the blocks"
    ),
    "roberta": Family(
        "RobertaForSequenceClassification",
        "RobertaConfig",
        {**_BERT, "max_position_embeddings": 258, **_SPECIAL, "pad_token_id": 0},
        "encoder",
        floor=0.9,
        why="outside the blocks",
    ),
    "deberta_v2": Family(
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {
            **_BERT,
            "relative_attention": True,
            "position_buckets": 32,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "pooler_hidden_size": 64,
        },
        "encoder",
        floor=0.9,
        why="outside the blocks",
    ),
    "distilbert": Family(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 64,
            "hidden_dim": 96,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "pad_token_id": 0,
        },
        "encoder",
        floor=0.9,
        why="outside the blocks",
    ),
    "modernbert": Family(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {
            **_BERT,
            **_SPECIAL,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 16,
            "global_attn_every_n_layers": 2,
            "initializer_range": 0.2,
        },
        "encoder",
        floor=0.9,
        why="outside the blocks",
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-gelu",
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
        "seq2seq",
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 256,
            "init_std": 0.2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
            **_SPECIAL,
        },
        "seq2seq",
    ),
    "marian": Family(
        "MarianMTModel",
        "MarianConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 256,
            "init_std": 0.2,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": 2,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
        "seq2seq",
    ),
}


@cache
def _tokenizer() -> Any:
    return make_tokenizer()


def make_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.settings | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, family.model)(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and bool((parameter == 0).all()):
                parameter.normal_(0, 0.1)  # biases that begin at zero would hide one that goes missing
    return model


def save_family(
    directory: Path, name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write a tiny model of the family ``name``; ``changes`` go into its config."""
    make_model(name, seed, dtype, **changes).save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


Save = Callable[..., Path]
