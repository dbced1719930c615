"""DFlash: a block drafter whose slots are read all at once, through the target's own tables (z-lab)."""

from __future__ import annotations

import mlx.core as mx

from mlx_dspark.catalog.formats import DrafterCheckpoint
from mlx_dspark.drafters.block import BlockDrafter, Chain, Draw
from mlx_dspark.drafters.dflash.backbone import DFlashModel


def build_model(checkpoint: DrafterCheckpoint, window: int) -> DFlashModel:
    """The model of `checkpoint`, without its weights."""
    return DFlashModel(checkpoint.config, window)


class DFlashDrafter(BlockDrafter):
    """Slots do not depend on each other's drafts; slot 0 is the anchor's and predicts nothing."""

    def embed_ids(self, tokens: mx.array) -> mx.array:
        rows = self.target.embed(tokens)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def _drafts(self, hidden: mx.array, anchors: mx.array, draw: Draw) -> Chain:
        logits = self._finished(self.target.unembed(hidden))
        return Chain(draw(0, logits), logits, logits)

    def _finished(self, logits: mx.array) -> mx.array:
        """With the multiplier and the cap of the head's own config."""
        logits = logits * self.config.output_multiplier
        cap = self.config.softcap
        return logits if cap is None else cap * mx.tanh(logits / cap)
