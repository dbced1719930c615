"""DSpark's model: a block backbone in Qwen3's or Gemma 4's style, with its tables and heads."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.catalog.formats import DrafterConfig
from mlx_dspark.drafters.dspark.heads import ConfidenceHead, markov_head
from mlx_dspark.drafters.dspark.noise import NoiseEmbedding
from mlx_dspark.drafters.layers import attentions
from mlx_dspark.nn.block import BlockBackbone, BlockLayer, ContextAttention, Surroundings
from mlx_dspark.nn.context import ContextLayer


class Gemma4Layer(BlockLayer):
    """Norms before and after attention and MLP, tanh-GELU, and a scalar on the whole layer."""

    def __init__(self, attention: ContextAttention, wide: int) -> None:
        super().__init__(attention, wide)
        hidden, eps = attention.shape.hidden, attention.shape.norm_eps
        self.mlp.activation = nn.gelu_approx
        self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(
        self, h: mx.array, rows: Sequence[ContextLayer] | Surroundings, position: int | mx.array
    ) -> mx.array:
        attended = self.self_attn(self.input_layernorm(h), rows, position)
        h = h + self.post_attention_layernorm(attended)
        widened = self.mlp(self.pre_feedforward_layernorm(h))
        return (h + self.post_feedforward_layernorm(widened)) * self.layer_scalar


class DSparkModel(BlockBackbone):
    """Backbone, tables the checkpoint owns, Markov head and confidence head."""

    def __init__(self, config: DrafterConfig, window: int) -> None:
        layer = Gemma4Layer if config.backbone == "gemma4" else BlockLayer
        layers = [layer(attention, config.intermediate) for attention in attentions(config, window)]
        super().__init__(layers, len(config.taps))
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        if config.noise_levels:
            self.log_snr_embed = NoiseEmbedding(config.hidden)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        markov = markov_head(
            config.markov, config.vocab, config.draft_vocab, config.markov_rank, config.hidden
        )
        if markov is not None:
            self.markov_head = markov
        if config.confidence:
            extra = config.markov_rank if config.confidence_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden + extra)
