"""DFlash 2's model: DFlash's backbone, convolutions around each sublayer, and the candidate selector."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_dspark.catalog.formats import DrafterConfig
from mlx_dspark.catalog.formats.base import Convolution
from mlx_dspark.drafters.dflash2.convolution import INPUT, OUTPUT, DynamicConv, convolved
from mlx_dspark.drafters.dflash2.selector import CandidateSelector
from mlx_dspark.drafters.layers import attentions
from mlx_dspark.nn.block import BlockBackbone, BlockLayer, ContextAttention, Surroundings
from mlx_dspark.nn.context import ContextLayer


class ConvolvedLayer(BlockLayer):
    """A BlockLayer whose attention and MLP are each convolved on both sides."""

    def __init__(self, attention: ContextAttention, wide: int, convolution: Convolution) -> None:
        super().__init__(attention, wide)
        self.attention_conv = DynamicConv(convolution, attention.shape.hidden)
        self.mlp_conv = DynamicConv(convolution, attention.shape.hidden)

    def __call__(
        self, h: mx.array, rows: Sequence[ContextLayer] | Surroundings, position: int | mx.array
    ) -> mx.array:
        x = self.input_layernorm(h)
        kernels = self.attention_conv.coefficients(x)
        attended = self.self_attn(convolved(kernels, INPUT, x), rows, position)
        h = h + convolved(kernels, OUTPUT, attended)
        x = self.post_attention_layernorm(h)
        kernels = self.mlp_conv.coefficients(x)
        return h + convolved(kernels, OUTPUT, self.mlp(convolved(kernels, INPUT, x)))


class DFlash2Model(BlockBackbone):
    """No tables and no vocabulary head of its own."""

    def __init__(self, config: DrafterConfig, window: int) -> None:
        assert config.convolution is not None
        assert config.selector is not None
        layers = [
            ConvolvedLayer(attention, config.intermediate, config.convolution)
            for attention in attentions(config, window)
        ]
        super().__init__(layers, len(config.taps))
        self.candidate_selector = CandidateSelector(config.selector, config.vocab, config.hidden)
