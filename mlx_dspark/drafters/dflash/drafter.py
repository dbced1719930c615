"""DFlash: a block drafter whose slots are read all at once, in most heads through the target's tables."""

from __future__ import annotations

import mlx.core as mx

from mlx_dspark.catalog.formats import DrafterCheckpoint, DrafterConfig
from mlx_dspark.drafters.block import BlockDrafter, Chain, Draw
from mlx_dspark.drafters.dflash.backbone import DFlashModel


def build_model(checkpoint: DrafterCheckpoint, window: int) -> DFlashModel:
    """The model of `checkpoint`, without its weights."""
    return DFlashModel(checkpoint.config, window)


class DFlashDrafter(BlockDrafter):
    """Slots do not depend on each other's drafts."""

    model: DFlashModel

    def embed_ids(self, tokens: mx.array) -> mx.array:
        rows = self.model.embed_tokens(tokens) if self.config.own_embedding else self.target.embed(tokens)
        return entering(self.config, rows)

    def _drafts(self, hidden: mx.array, anchors: mx.array, draw: Draw) -> Chain:
        head = self.model.lm_head if self.config.own_head else self.target.unembed
        logits = finished(self.config, head(hidden))
        return Chain(draw(0, logits), logits, logits)


def entering(config: DrafterConfig, rows: mx.array) -> mx.array:
    """Embeddings with the scale of the head's own config."""
    return rows if config.embedding_scale == 1.0 else rows * config.embedding_scale


def finished(config: DrafterConfig, logits: mx.array) -> mx.array:
    """Logits with the multiplier and the cap of the head's own config."""
    logits = logits * config.output_multiplier
    cap = config.softcap
    return logits if cap is None else cap * mx.tanh(logits / cap)
