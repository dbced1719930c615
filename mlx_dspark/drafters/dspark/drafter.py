"""DSpark: a block drafter whose slots are read in sequence through a Markov head (DeepSpec)."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx

from mlx_dspark.catalog.formats import DrafterCheckpoint
from mlx_dspark.contracts import Target
from mlx_dspark.drafters.block import BlockDrafter, Chain, Draw
from mlx_dspark.drafters.draw import GreedyDraw
from mlx_dspark.drafters.dspark.backbone import DSparkModel
from mlx_dspark.drafters.dspark.heads import MarkovHead
from mlx_dspark.drafters.dspark.host import HostMarkov
from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_chain.chain import GreedyChain


def build_model(checkpoint: DrafterCheckpoint, window: int) -> DSparkModel:
    """The model of `checkpoint`, without its weights."""
    return DSparkModel(checkpoint.config, window)


class DSparkDrafter(BlockDrafter):
    """Owns or borrows the embedding and the head, each as the checkpoint has it."""

    model: DSparkModel
    _host_markov: HostMarkov | None = None
    _device_chain: GreedyChain | None = None

    def hold_weights(self, choice: str, cache_dir: Path) -> None:
        super().hold_weights(choice, cache_dir)
        self._host_markov = HostMarkov.of(self.model.get("markov_head"), self.vocab.ids)

    def bind(self, target: Target) -> None:
        super().bind(target)
        head = self.model.get("markov_head")
        if mx.cuda.is_available() and type(head) is MarkovHead:
            ids = self.vocab.ids
            chain = GreedyChain.of(Source.of(head.markov_w1), Source.of(head.markov_w2), ids)
            logits = mx.random.normal((1, 2, self.config.draft_vocab), key=mx.random.key(0)).astype(
                self.dtype
            )
            self._device_chain = chain if chain is not None and chain.right_here(logits) else None

    def embed_ids(self, tokens: mx.array) -> mx.array:
        rows = self._table_rows(tokens)
        if not self.config.noise_levels:
            return rows
        return rows + self.model.log_snr_embed(tokens.shape[1]).astype(rows.dtype)

    def _table_rows(self, tokens: mx.array) -> mx.array:
        if not self.config.own_embedding:
            return self.target.embed(tokens)
        rows = self.model.embed_tokens(tokens)
        if self.config.backbone == "gemma4":
            rows = rows * mx.array(math.sqrt(self.config.hidden), dtype=rows.dtype)
        return rows

    def _drafts(self, hidden: mx.array, anchors: mx.array, draw: Draw) -> Chain:
        base = self.base_logits(hidden)
        if self.config.markov == "none":
            return Chain(draw(0, base), base, base, self.confidence_logits(hidden))
        return self._markov_chain(hidden, base, anchors, draw)

    def base_logits(self, hidden: mx.array) -> mx.array:
        """`[rows, width, hidden]` to logits over the draft vocabulary, without the Markov bias."""
        if self.config.own_head:
            logits = self.model.lm_head(hidden)
        elif self.config.tied:
            logits = self.model.embed_tokens.as_linear(hidden)
        else:
            logits = self.target.unembed(hidden)
        cap = self.config.softcap
        return logits if cap is None else cap * mx.tanh(logits / cap)

    def _markov_chain(self, hidden: mx.array, base: mx.array, anchors: mx.array, draw: Draw) -> Chain:
        """Draft `i` is biased by draft `i - 1`, the first by the anchor."""
        if self._host_markov is not None and isinstance(draw, GreedyDraw):
            chain = self._host_markov.greedy(base, anchors)
            confidence = self.confidence_logits(hidden, chain.previous)
            return Chain(chain.tokens, base, chain.logits, confidence)
        head = self.model.markov_head
        if self._device_chain is not None and isinstance(draw, GreedyDraw) and base.dtype == self.dtype:
            drafts = self._device_chain(base, anchors)
            previous = head.markov_w1(mx.concatenate([anchors[:, None], drafts[:, :-1]], axis=1))
            logits = base + head.markov_w2(previous)
            return Chain(drafts, base, logits, self.confidence_logits(hidden, previous))
        token, state = anchors[:, None], None
        tokens, logits, embedded = [], [], []
        for slot in range(hidden.shape[1]):
            previous = head.markov_w1(token[:, 0])
            bias, state = head.step(previous, hidden[:, slot], state)
            logits.append((base[:, slot] + bias)[:, None])
            token = draw(slot, logits[-1])
            tokens.append(token)
            embedded.append(previous)
        confidence = self.confidence_logits(hidden, mx.stack(embedded, axis=1))
        return Chain(mx.concatenate(tokens, axis=1), base, mx.concatenate(logits, axis=1), confidence)

    def confidence_logits(self, hidden: mx.array, previous: mx.array | None = None) -> mx.array | None:
        """`[rows, width]`, or None without a confidence head; `previous` are the embedded tokens before."""
        if not self.config.confidence:
            return None
        if self.config.confidence_with_markov and previous is not None:
            return self.model.confidence_head(hidden, previous)
        return self.model.confidence_head(hidden)
