"""A tiny random model of every text model that mlx-lm has, from one table of what is special to each.

`ONLY` names every module of `mlx_lm.models` that holds a model; a config takes from COMMON what the module's
arguments know, and from ONLY what is its own.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from tests.tiny import CONTEXT, SPECIAL_TOKENS, VOCAB

WINDOW = 16
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 4, 4, 2, 16

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "num_vocab": VOCAB,
    "hidden_size": _HIDDEN,
    "hidden_dim": _HIDDEN,
    "model_dim": _HIDDEN,
    "d_model": _HIDDEN,
    "n_embd": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "n_layer": _LAYERS,
    "n_layers": _LAYERS,
    "num_transformer_layers": _LAYERS,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ff_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "n_inner": 96,
    "num_attention_heads": _HEADS,
    "num_heads": _HEADS,
    "n_head": _HEADS,
    "n_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "num_kv_heads": _KV_HEADS,
    "n_kv_heads": _KV_HEADS,
    "n_kv_head": _KV_HEADS,
    "num_attention_groups": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "hidden_size_per_head": _HEAD_DIM,
    "kv_channels": _HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": CONTEXT,
    "model_max_length": CONTEXT,
    "n_positions": CONTEXT,
    "n_ctx": CONTEXT,
    "block_size": CONTEXT,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "query_pre_attn_scalar": 16,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    # windows
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "loop_window_size": WINDOW,
    "sliding_window_pattern": 2,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "moe_hidden_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "share_expert_dim": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    # latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # multipliers
    "logit_scale": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "dim_model_base": 32,
    "scale_depth": 1.4,
    "scale_emb": 3.0,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "logits_soft_cap": 3.0,
    # recurrences
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "conv_bias": True,
    "conv_L_cache": 3,
    "conv_kernel": 4,
    "conv1d_width": 4,
    "short_conv_kernel_size": 4,
    "state_size": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "use_conv_bias": True,
    "time_step_rank": 8,
    "time_step_limit": [0.001, 100.0],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
"""By the name of an argument, whichever models know it."""

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2
_DELTA = {
    "tie_word_embeddings": False,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale_all_dim": 1.0}
_YARN_FREE = {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}
_DEEPSEEK = {"num_key_value_heads": _HEADS, "head_dim": 8}
_INDEXED = {**_DEEPSEEK, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}
_KDA = {
    "head_dim": 16,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
}

ONLY: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afm7": {"num_layers": 3, "num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _ALTERNATING},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "bailing_hybrid": {"num_key_value_heads": _HEADS},
    "bailing_moe": {},
    "bailing_moe_linear": {"num_key_value_heads": _HEADS, "moe_shared_expert_intermediate_size": 32},
    "bailing_moe_v3": {"moe_shared_expert_intermediate_size": 32, "num_key_value_heads": _HEADS},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": _KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {"num_key_value_heads": _KV_HEADS},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "greedy", "rope_scaling": _YARN},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _INDEXED,
    "deepseek_v41": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone": {},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _ALTERNATING, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"head_dim": 16, "lm_head_multiplier": 0.5},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "gemma": {},
    "gemma2": {},
    "gemma3": {"text": "gemma3_text"},
    "gemma3_text": {},
    "gemma3n": {"text": "gemma3n.TextConfig"},
    "gemma3n.TextConfig": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0, 0.0],
        "rope_local_base_freq": 10000.0,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 3,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "intermediate_size": [96] * 6,
    },
    "gemma4": {"text": "gemma4_text"},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "sliding_window_pattern": 2,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": {**_INDEXED, "rope_parameters": _PLAIN_ROPE},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {},
    "gptj": {},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "helium": {},
    "hunyuan": {
        "use_cla": True,
        "cla_share_factor": 2,
        "use_mixed_mlp_moe": True,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text": "deepseek_v3"},
    "kimi_k3": {"text": "kimi_k3.TextArgs"},
    "kimi_k3.TextArgs": {
        **_DEEPSEEK,
        "linear_attn_config": _KDA,
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 1.0,
        "attn_res_block_size": 2,
    },
    "kimi_linear": {**_DEEPSEEK, "linear_attn_config": _KDA},
    "kimi_vl": {"text": "kimi_vl.TextArgs"},
    "kimi_vl.TextArgs": _DEEPSEEK,
    "laguna": {
        "layer_types": _ALTERNATING,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": _YARN_FREE,
    },
    "lfm2-vl": {"text": "lfm2"},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "use_expert_bias": True},
    "lille-130m": {},
    "llama": {"layer_types": _ALTERNATING},
    "llama4": {"text": "llama4.TextArgs"},
    "llama4.TextArgs": {"attention_chunk_size": 16, "interleave_moe_layer_step": 1, "num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "num_layers": 2,
    },
    "longcat_flash_ngram": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "num_layers": 2,
        "ngram_vocab_size_ratio": 3,
        "emb_split_num": 2,
        "emb_neighbor_num": 3,
    },
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "intermediate_size": 64},
    "mellum": {"layer_types": _ALTERNATING, "rope_parameters": _YARN_FREE},
    "mimo": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "n_shared_experts": None,
    },
    "minicpm": {},
    "minicpm3": {
        "rope_scaling": {
            "original_max_position_embeddings": CONTEXT,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        }
    },
    "minimax": {},
    "minimax_m3_vl": {"text": "minimax_m3_vl.TextArgs"},
    "minimax_m3_vl.TextArgs": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "dense_intermediate_size": 96,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "moe_layer_freq": [0, 1, 1, 1],
    },
    "ministral3": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {
            **_PLAIN_ROPE,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mistral3": {"text": "ministral3"},
    "mistral4": {
        "head_dim": 24,
        "num_key_value_heads": _HEADS,
        "rope_interleave": True,
        "rope_parameters": {
            **_PLAIN_ROPE,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mixtral": {},
    "muse_glimmer": {"layer_types": _ALTERNATING},
    "muse_spark": {"text": "muse_spark.TextArgs"},
    "muse_spark.TextArgs": {
        "layer_types": _ALTERNATING,
        "layer_rope_theta": [10000.0, 0, 10000.0, 0],
        "post_norm_eps": 1e-8,
        "rope_parameters": {"rope_theta": 10000.0},
        "output_multiplier": 0.5,
        "num_shared_experts": 0,
    },
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            },
            {
                "attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            },
        ]
        * 2,
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "-", "M", "*", "M"], "n_routed_experts": None},
    "olmo2": {},
    "olmo3": {"layer_types": _ALTERNATING},
    "olmo_hybrid": {"layer_types": _LINEAR, "linear_allow_neg_eigval": True, "linear_num_key_heads": 4},
    "olmoe": {},
    "openelm": {
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
        "ffn_multipliers": [1.0, 1.5, 1.5, 2.0],
    },
    "phi": {"num_key_value_heads": _HEADS},
    "phi3": {},
    "phi3small": {
        "vocab_size": 100352,
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 64,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "rope_scaling": {
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.0,
            "short_mscale": 1.0,
        }
    },
    "phixtral": {},
    "pixtral": {"text": "llama"},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"full_attention_idx": None},
    "plamo3": {},
    "prism_hadamard_qwen35": {},
    "qwen": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen2_vl": {"text": "qwen2"},
    "qwen3": {},
    "qwen3_5": {"text": "qwen3_5.TextModelArgs"},
    "qwen3_5.TextModelArgs": {**_DELTA, "num_experts": 0},
    "qwen3_5_moe": {"text": "qwen3_5.TextModelArgs", "num_experts": 4},
    "qwen3_moe": {},
    "qwen3_next": _DELTA,
    "qwen3_vl": {"text": "qwen3"},
    "qwen3_vl_moe": {"text": "qwen3_moe"},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"]},
    "rwkv7": {
        "head_dim": 16,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "seed_oss": {},
    "smollm3": {"layer_types": _ALTERNATING, "no_rope_layer_interval": 2},
    "solar_open": {},
    "spark2_5": {"layer_types": _ALTERNATING, "rope_parameters": _YARN_FREE},
    "stablelm": {},
    "starcoder2": {},
    "step3p5": {"layer_types": _ALTERNATING, "moe_layers_enum": "1,2,3"},
    "talkie": {"num_attention_heads": _HEADS},
    "telechat3": {},
    "youtu_llm": _DEEPSEEK,
}


WIDE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "hidden_dim", "model_dim", "block_dim"), 256),
    **dict.fromkeys(("head_dim", "hidden_size_per_head", "kv_channels", "v_head_dim"), 64),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "index_head_dim"), 64),
    **dict.fromkeys(("global_head_dim", "swa_head_dim", "swa_v_head_dim"), 64),
}
"""What takes the place of a config's own where heads are to be 64 wide."""

_WIDE_ROPE = {"short_factor": [1.0] * 32, "long_factor": [1.0] * 32}
WIDE_ONLY: dict[str, dict[str, Any]] = {
    "minicpm3": {"rope_scaling": {**_WIDE_ROPE, "original_max_position_embeddings": CONTEXT}},
    "phimoe": {"rope_scaling": {**_WIDE_ROPE, "long_mscale": 1.0, "short_mscale": 1.0}},
}

for _family in ("llama", "pixtral", "ministral3", "mistral3"):
    WIDE_ONLY[_family] = {"layer_types": ["full_attention"] * _LAYERS}
"""Families that have windows only where a config says so."""


def family_config(family: str, *, wide: bool = False) -> dict[str, Any]:
    """A config.json of module `family` of `mlx_lm.models`; `wide`: its heads may be held in few bits."""
    special = dict(ONLY[family])
    config: dict[str, Any] = {"model_type": family}
    if text := special.pop("text", None):
        config["text_config"] = _arguments(text, ONLY[text] | special)
        config["vocab_size"] = VOCAB
    else:
        config |= _arguments(family, special)
    if wide:
        inner = config.get("text_config", config)
        inner.update({key: value for key, value in WIDE.items() if key in inner}, **WIDE_ONLY.get(family, {}))
    return config


def _arguments(place: str, special: dict[str, Any]) -> dict[str, Any]:
    module, _, name = place.partition(".")
    home = import_module(f"mlx_lm.models.{module}")
    kind = getattr(home, name or "ModelArgs")
    known = {each.name for each in dataclasses.fields(kind)}
    common = {key: value for key, value in COMMON.items() if key in known}
    return {"model_type": module} | common | dict(special)


def tiny_family(family: str, *, seed: int = 0, wide: bool = False, **overrides: Any) -> nn.Module:
    """A random float32 model, the same for the same seed. The special tokens are never the greedy choice."""
    config = family_config(family, wide=wide) | overrides
    home = import_module(f"mlx_lm.models.{family}")
    model = home.Model(home.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    named = zip(parameters, keys, strict=True)
    model.update(tree_unflatten([(name, _random(name, old, key)) for (name, old), key in named]))
    if family.startswith(_SCALED):
        width = WIDE["hidden_size"] if wide else _HIDDEN
        model.update(tree_map_with_path(partial(_without_scale, width), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


_SCALED = ("gemma", "gear", "recurrent_gemma")
"""Families that multiply their embedding by the root of its width."""


def _without_scale(width: int, name: str, weight: mx.array) -> mx.array:
    return weight / width**0.5 if name.split(".")[-2] == "embed_tokens" else weight


_TABLES = ("embed_tokens", "embeddings", "wte", "tok_embeddings", "word_embeddings", "embedding")
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 3.0, "out_proj": 3.0, "lm_head": 1.0, "embed_tokens": 2.0}


def _random(name: str, old: mx.array, key: mx.array) -> mx.array:
    """What the layers add outweighs the token's own embedding: text depends on more than the last token."""
    owner, part = ("." + name).split(".")[-2:]
    if not mx.issubdtype(old.dtype, mx.floating):
        return old
    noise = mx.random.normal(old.shape, key=key)
    if part == "A_log":
        return mx.log(0.05 + 0.5 * mx.abs(noise))
    if part == "dt_bias":
        return 0.5 * noise
    if "bias" in part:
        return 0.1 * noise
    if old.ndim <= 1:
        return (2.0 if owner in ("q_norm", "k_norm") else 1.0) + 0.1 * noise
    fan = old.shape[-1] if "conv" not in owner else old.shape[1]
    weight = noise * (_GAINS.get(owner, 1.5) / fan**0.5)
    if owner == "lm_head" or owner in _TABLES:
        weight[: len(SPECIAL_TOKENS)] *= 1e-3
    return weight
