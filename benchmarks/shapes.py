"""Models with the shapes of real ones and random weights: what they cost is real, what they say is not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.compat.mlx_lm_models import empty_model
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of

GROUP = 64

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 65536,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_COMMON,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3_5-9b": {
        **_COMMON,
        "model_type": "qwen3_5",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
        "moe_intermediate_size": 0,
    },
    "lfm2-1.2b": {
        **_COMMON,
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
    },
    "nemotron_h-8b": {
        **_COMMON,
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "num_hidden_layers": 52,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "attention_bias": False,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_proj_bias": False,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": list("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
    },
}
_BY_LAYER = ("layer_types", "hybrid_override_pattern")
_SLICE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "block_dim": 256,
    "intermediate_size": 512,
    "block_ff_dim": 512,
}
SLICE_LAYERS = 8


def target_of_shape(name: str, *, bits: int, slim: bool = False, **changes: Any) -> DenseTarget:
    """As `model_of_shape`, as a target."""
    return target_of(*model_of_shape(name, bits=bits, slim=slim, **changes))


def model_of_shape(
    name: str, *, bits: int, slim: bool = False, **changes: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """A bfloat16 model of this shape with random weights in `bits` bits, and its config.

    `slim` is for trying a script anywhere: a few narrow layers in float32, whose times say nothing. `changes`
    are made to the config last.
    """
    config = dict(SHAPES[name])
    if slim:
        config.update({key: value for key, value in _SLICE.items() if key in config})
        config["num_hidden_layers"] = SLICE_LAYERS
        config.update({key: config[key][:SLICE_LAYERS] for key in _BY_LAYER if key in config})
    config.update(changes)
    model = empty_model(config)
    assert model is not None, f"mlx-lm builds no model of the shape {name}"
    if not slim:
        model.set_dtype(mx.bfloat16)
        nn.quantize(model, group_size=GROUP, bits=bits)
    for part in (*model.layers, model):  # type: ignore[misc]
        mx.eval(part.parameters())
        mx.clear_cache()
    return model, config
