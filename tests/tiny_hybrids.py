"""Tiny random models with recurrent layers, built from mlx-lm's own classes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from tests.tiny import CONTEXT, SPECIAL_TOKENS, VOCAB

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_SHORT_CONV: dict[str, Any] = {
    "norm_eps": 1e-5,
    "conv_bias": True,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}

_DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "num_experts": 0,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
}

_MAMBA: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hybrid_override_pattern": ["M", "-", "M", "*", "M"],
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        **_SHORT_CONV,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **_SHORT_CONV,
        **_EXPERTS,
        "norm_topk_prob": True,
        "num_dense_layers": 1,
        "use_expert_bias": True,
    },
    "qwen3_next": _DELTA,
    "qwen3_next moe": {**_DELTA, **_EXPERTS, "norm_topk_prob": True},
    "qwen3_5": _DELTA,
    "qwen3_5_moe": {**_DELTA, **_EXPERTS},
    "nemotron_h": _MAMBA,
}


def hybrid_config(family: str) -> dict[str, Any]:
    """A config.json of the family's layout."""
    return {"model_type": family.split()[0], **_COMMON, **HYBRIDS[family]}


def tiny_hybrid(family: str, *, seed: int = 0) -> nn.Module:
    """A random float32 model, the same for the same seed. The special tokens are never the greedy choice."""
    config = hybrid_config(family)
    home = import_module(f"mlx_lm.models.{config['model_type']}")
    model = home.Model(home.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    named = zip(parameters, keys, strict=True)
    model.update(tree_unflatten([(name, _random(name, old, key)) for (name, old), key in named]))
    model.eval()
    mx.eval(model.parameters())
    return model


_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 3.0, "out_proj": 3.0, "lm_head": 1.0, "embed_tokens": 2.0}


def _random(name: str, old: mx.array, key: mx.array) -> mx.array:
    """What the layers add outweighs the token's own embedding: text depends on more than the last token."""
    owner, part = ("." + name).split(".")[-2:]
    noise = mx.random.normal(old.shape, key=key)
    if part == "A_log":
        return mx.log(0.05 + 0.5 * mx.abs(noise))
    if part == "dt_bias":
        return 0.5 * noise
    if part in ("bias", "expert_bias"):
        return 0.1 * noise
    if old.ndim == 1:
        return (2.0 if owner in ("q_norm", "k_norm") else 1.0) + 0.1 * noise
    fan = old.shape[-1] if "conv" not in owner else old.shape[1]
    weight = noise * (_GAINS.get(owner, 1.5) / fan**0.5)
    if owner in ("lm_head", "embed_tokens", "embeddings"):
        weight[: len(SPECIAL_TOKENS)] = 0.0
    return weight
