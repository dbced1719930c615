"""DFlash 2: DFlash whose slots choose, in sequence, among a few candidates each (Inco AI)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_dspark.catalog.formats import DrafterCheckpoint
from mlx_dspark.contracts import Ask
from mlx_dspark.drafters.block import BlockDrafter, Chain, Draw
from mlx_dspark.drafters.dflash.drafter import entering, finished
from mlx_dspark.drafters.dflash2.backbone import DFlash2Model
from mlx_dspark.drafters.dflash2.selector import best_candidates
from mlx_dspark.foundation.request import SamplingParams


def build_model(checkpoint: DrafterCheckpoint, window: int) -> DFlash2Model:
    """The model of `checkpoint`, without its weights."""
    return DFlash2Model(checkpoint.config, window)


class DFlash2Drafter(BlockDrafter):
    """The target's head names the candidates of a slot; the selector chooses, knowing the draft before."""

    model: DFlash2Model

    @property
    def name(self) -> str:
        return "dflash"

    def embed_ids(self, tokens: mx.array) -> mx.array:
        return entering(self.config, self.target.embed(tokens))

    def _drafts(self, hidden: mx.array, anchors: mx.array, draw: Draw) -> Chain:
        selector, shape = self.model.candidate_selector, self.config.selector
        assert shape is not None
        base = self.base_logits(hidden)
        ids = best_candidates(base, shape.candidates)
        unary, successors = mx.take_along_axis(base, ids, axis=-1), selector.successors(hidden, ids)
        token, tokens, scores = anchors, [], []
        for slot in range(hidden.shape[1]):
            scores.append(unary[:, slot : slot + 1] + selector.follow(token, successors[:, slot]))
            tokens.append(draw.among(slot, scores[-1], ids[:, slot : slot + 1]))
            token = tokens[-1][:, 0]
        nowhere = mx.full(base.shape, -math.inf)
        logits = mx.put_along_axis(nowhere, ids, mx.concatenate(scores, axis=1), axis=-1)
        return Chain(mx.concatenate(tokens, axis=1), base, logits)

    def base_logits(self, hidden: mx.array) -> mx.array:
        """`[rows, width, hidden]` to the float32 logits `[rows, width, vocab]` that the selector starts from.

        Unlike a DSpark head's they have the multiplier and the cap, at whose scale the selector was trained.
        """
        logits = self.target.unembed(hidden)[..., : self.config.vocab]
        return finished(self.config, logits.astype(mx.float32))

    def _draw(self, ask: Ask, active: Sequence[int]) -> Draw:
        """q takes the temperature alone; top-k, top-p and min-p would cut a choice that is cut already."""
        tempered = [SamplingParams(temperature=row.temperature) for row in ask.sampling]
        return super()._draw(replace(ask, sampling=tempered), active)
