"""DFlash's model: the plain block backbone in Qwen3's style, whatever the target is."""

from __future__ import annotations

import mlx.nn as nn

from mlx_dspark.catalog.formats import DrafterConfig
from mlx_dspark.drafters.layers import attentions
from mlx_dspark.nn.block import BlockBackbone, BlockLayer


class DFlashModel(BlockBackbone):
    """No heads, and only the tables that the checkpoint owns: z-lab's own none."""

    def __init__(self, config: DrafterConfig, window: int) -> None:
        layers = [BlockLayer(attention, config.intermediate) for attention in attentions(config, window)]
        super().__init__(layers, len(config.taps))
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
