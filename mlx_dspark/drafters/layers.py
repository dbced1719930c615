"""From a drafter's config to the attention of each of its layers."""

from __future__ import annotations

from mlx_dspark.catalog.formats import DrafterConfig
from mlx_dspark.nn.block import AttentionShape, BlockMask, ContextAttention
from mlx_dspark.nn.rope import Rope


def attentions(config: DrafterConfig, window: int) -> list[ContextAttention]:
    """One attention per drafter layer, each with its own mask; `window` as in `load_drafter`.

    Gemma 4 differs from Qwen3 in unscaled scores and normed values.
    """
    gemma4 = config.backbone == "gemma4"
    shape = AttentionShape(
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        bias=config.attention_bias,
        scaled=not gemma4,
        value_norm=gemma4,
        values_from_keys=config.values_from_keys,
        sinks=config.sinks,
        gated=config.gated,
    )
    rope = Rope(config.head_dim, config.rope_theta, config.rope_kind, config.rope_options)
    masks = map(BlockMask, config.layer_causal, config.layer_windows)
    return [ContextAttention(shape, rope, mask, window) for mask in masks]
