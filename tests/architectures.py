"""Tiny random models of every family, saved as a user would find them: config, safetensors, tokenizer."""

import random
from dataclasses import dataclass
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

    ``kind`` is what the model is for: causal, vision (causal, with images), encoder, seq2seq or speech. ``floor`` is the coverage that it must reach;
    ``why`` is the reason that has to be listed for what a floor below 99 % leaves out."""

    model: str
    config: str
    settings: dict[str, Any]
    kind: str = "causal"
    floor: float = 0.99
    why: str = ""


def _llama(name: str, *, drop: tuple[str, ...] = (), **changes: Any) -> Family:
    settings = {k: v for k, v in (_LLAMA | changes).items() if k not in drop}
    return Family(f"{name}ForCausalLM", f"{name}Config", settings)


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.2,
}
_QWEN_VISION = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "initializer_range": 0.2,
}
_QWEN_VL = {
    "text_config": {
        **{k: v for k, v in _LLAMA.items() if k != "head_dim"},
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    },
    "image_token_id": 319,
    "video_token_id": 318,
    "vision_start_token_id": 316,
    "vision_end_token_id": 317,
}

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
    "gemma3": Family(
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
        floor=0.99,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
        floor=0.99,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _LLAMA | _MOE | {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
        floor=0.99,
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
        why="convolution",
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
    "llava": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": {"model_type": "clip_vision_model", **_VISION, "projection_dim": 32},
            "text_config": {"model_type": "llama", **_LLAMA},
            "image_token_id": 319,
            "image_seq_length": 4,
        },
        "vision",
        floor=0.35,
        why="outside the language model",
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            **_QWEN_VL,
            "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        },
        "vision",
        floor=0.35,
        why="outside the language model",
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            **_QWEN_VL,
            "vision_config": {
                **_QWEN_VISION,
                "hidden_size": 32,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
        "vision",
        floor=0.35,
        why="outside the language model",
    ),
    "gemma3_vl": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "vision_config": _VISION,
            "text_config": {**_LLAMA, "sliding_window": 16, "query_pre_attn_scalar": 16},
            "mm_tokens_per_image": 4,
            "image_token_id": 319,
            "boi_token_id": 317,
            "eoi_token_id": 318,
        },
        "vision",
        floor=0.35,
        why="outside the language model",
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 16,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_source_positions": 50,
            "max_target_positions": 256,
            "init_std": 0.2,
            "decoder_start_token_id": 1,
            "begin_suppress_tokens": None,
            **_SPECIAL,
        },
        "speech",
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


TITLES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "phi3": "Phi-3",
    "falcon": "Falcon",
    "gpt2": "GPT-2",
    "opt": "OPT",
    "gpt_neox": "GPT-NeoX",
    "cohere": "Cohere",
    "olmo2": "OLMo 2",
    "smollm3": "SmolLM3",
    "deepseek_v3": "DeepSeek-V3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "gpt_oss": "gpt-oss",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "jamba": "Jamba",
    "bamba": "Bamba",
    "bert": "BERT (classifier)",
    "bert_mlm": "BERT (language model)",
    "roberta": "RoBERTa (classifier)",
    "deberta_v2": "DeBERTa-v2/v3 (classifier)",
    "distilbert": "DistilBERT (classifier)",
    "modernbert": "ModernBERT (classifier)",
    "llava": "LLaVA",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "gemma3_vl": "Gemma 3 (vision)",
    "whisper": "Whisper",
    "t5": "T5",
    "bart": "BART",
    "marian": "Marian",
}


@cache
def _tokenizer() -> Any:
    return make_tokenizer(pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<s>")


def make_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.settings | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, family.model)(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if bool((parameter == 0).all()):
                parameter.normal_(0, 0.1)  # zeros would hide that one goes missing
    return model


def save_family(
    directory: Path, name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write a tiny model of the family ``name``; ``changes`` go into its config."""
    make_model(name, seed, dtype, **changes).save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


def random_changes(name: str, seed: int) -> dict[str, Any]:
    """Settings of a small model of the family with unusual shapes: sides that 8, 16 or 32 do not divide, any ratio of
    query to key heads, with and without biases, tied or not."""
    rng = random.Random(f"{name} {seed}")
    heads = rng.choice([1, 2, 3, 4, 6, 11])
    size = rng.choice([8, 16, 24, 32])
    hidden = heads * size
    inner = rng.choice([32, 48, 64, 96, 100, 128, 176, 250])
    layers = rng.choice([1, 2, 3])
    common = {
        "vocab_size": VOCABULARY + rng.choice([0, 1, 3, 8, 13]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    known = FAMILIES[name].settings
    if name == "gpt2":
        return {**common, "n_embd": hidden, "n_head": heads, "n_inner": inner, "n_layer": layers}
    if name == "distilbert":
        return {**common, "dim": hidden, "n_heads": heads, "hidden_dim": inner, "n_layers": layers}
    if FAMILIES[name].kind == "vision":  # its language model varies
        text = known["text_config"] | common | {"intermediate_size": inner, "num_hidden_layers": layers}
        return {"text_config": text | {"num_key_value_heads": rng.choice([1, 2, 4])}}
    if name in ("bart", "marian", "whisper"):
        sides = ("encoder", "decoder")
        return {
            "vocab_size": common["vocab_size"],
            "d_model": hidden,
            **{f"{side}_layers": rng.choice([1, 2]) for side in sides},
            **{f"{side}_ffn_dim": inner for side in sides},
            **{f"{side}_attention_heads": heads for side in sides},
        }
    if name == "t5":
        activation = rng.choice(["relu", "gated-gelu"])
        return {
            **common, "d_model": hidden, "num_heads": heads, "d_kv": rng.choice([8, 16]), "d_ff": inner,
            "num_layers": layers, "num_decoder_layers": rng.choice([1, 2]), "feed_forward_proj": activation,
        }  # fmt: skip
    if name == "mamba":
        return {
            **common, "hidden_size": hidden, "num_hidden_layers": layers, "state_size": rng.choice([4, 8, 16]),
            "time_step_rank": rng.choice([3, 8]), "use_bias": rng.random() < 0.5, "expand": rng.choice([1, 2]),
        }  # fmt: skip
    if name == "mamba2":
        return {
            **common, "hidden_size": hidden, "num_hidden_layers": layers, "num_heads": 2 * heads, "head_dim": size,
            "state_size": rng.choice([8, 16]), "use_bias": rng.random() < 0.5, "n_groups": 1,
        }  # fmt: skip
    changes = {**common, "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    if "intermediate_size" in known:
        changes["intermediate_size"] = inner
    if "num_key_value_heads" in known:
        changes["num_key_value_heads"] = rng.choice([n for n in (1, 2, 3, 4, 6, 11) if heads % n == 0])
    if "head_dim" in known:
        changes["head_dim"] = rng.choice([size, 16, 32])
    match name:
        case "llama":
            changes |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
        case "falcon":
            changes |= {
                "ffn_hidden_size": inner, "bias": rng.random() < 0.5, "multi_query": rng.random() < 0.5,
                "parallel_attn": rng.random() < 0.5,
            }  # fmt: skip
        case "opt":
            changes |= {
                "ffn_dim": inner, "word_embed_proj_dim": rng.choice([hidden, 16]), "enable_bias": rng.random() < 0.5,
            }  # fmt: skip
        case "deepseek_v3":
            changes |= {
                "num_key_value_heads": heads, "q_lora_rank": rng.choice([None, 24, 32]),
                "kv_lora_rank": rng.choice([16, 32, 40]), "moe_intermediate_size": rng.choice([24, 32, 64]),
                "n_shared_experts": rng.choice([1, 2]),
            }  # fmt: skip
        case "mixtral" | "gpt_oss":
            changes |= {"num_local_experts": rng.choice([2, 3, 5])}
        case "qwen3_moe":
            changes |= {
                "num_experts": rng.choice([2, 3, 5]),
                "moe_intermediate_size": rng.choice([24, 32, 64]),
            }
        case "jamba":
            changes |= {"mamba_expand": rng.choice([1, 2]), "num_experts": rng.choice([2, 3])}
        case "bamba":
            changes |= {"mamba_n_heads": 2 * heads, "mamba_d_head": size, "attn_layer_indices": [0]}
        case "deberta_v2":
            changes |= {"pooler_hidden_size": hidden, "share_att_key": rng.random() < 0.5}
        case "phi3":
            changes |= {"partial_rotary_factor": 1.0}
    return changes
