"""Turning a block drafter's logits into drafts, and remembering the distributions they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_dspark.contracts import Ask, Proposal
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.probs import Candidates, Dense, DraftProbs, MappedVocab, PointMass
from mlx_dspark.nn.sampling import log_weights


class DraftVocab:
    """The ids a drafter's logits stand for. `d2t` `[draft_vocab]` holds offsets, None for all of them."""

    def __init__(self, size: int, d2t: mx.array | None = None) -> None:
        self.size = size
        self.d2t = d2t
        self.ids = None if d2t is None else mx.arange(d2t.size, dtype=mx.int32) + d2t
        self.drafted = size if d2t is None else d2t.size
        """How many ids the logits stand for."""

    def target(self, draft: mx.array) -> mx.array:
        """Target ids of draft ids."""
        return draft if self.ids is None else self.ids[draft]


class GreedyDraw:
    """The arg-max of every slot."""

    def __init__(self, vocab: DraftVocab) -> None:
        self.vocab = vocab

    def __call__(self, slot: int, logits: mx.array) -> mx.array:
        """Target ids `[rows, width]` from logits `[rows, width, draft_vocab]` of drafts `slot` onwards."""
        return self.vocab.target(mx.argmax(logits, axis=-1).astype(mx.int32))

    def among(self, slot: int, scores: mx.array, ids: mx.array) -> mx.array:
        """As `__call__`, from the `scores` `[rows, width, n]` of the target's `ids`, same shape."""
        return _picked(scores, ids)

    def probs(self, tokens: mx.array) -> DraftProbs:
        """q of everything drawn, which is `tokens` `[rows, width]`."""
        return PointMass(tokens, self.vocab.size)


class SampledDraw:
    """Each row by its own sampling: the arg-max of log q plus noise keyed by the draft's position.

    Penalties and bias are the target's matter: acceptance asks only that q is what was drawn from.
    """

    def __init__(
        self,
        vocab: DraftVocab,
        sampling: Sequence[SamplingParams],
        noise: RowNoise,
        first_positions: Sequence[int],
    ) -> None:
        self.vocab = vocab
        self.sampling = sampling
        self.noise = noise
        self.first_positions = mx.array(list(first_positions))[:, None]
        self._weights: list[mx.array] = []
        self._ids: list[mx.array] = []

    def __call__(self, slot: int, logits: mx.array) -> mx.array:
        """As GreedyDraw; draft `slot` of row `r` is for position `first_positions[r] + slot`."""
        weights = log_weights(logits, self.sampling)
        self._weights.append(weights)
        gumbel = self._gumbel(slot, logits.shape[1])
        if self.vocab.ids is not None:
            gumbel = mx.take(gumbel, self.vocab.ids, axis=-1)
        return self.vocab.target(mx.argmax(weights + gumbel, axis=-1).astype(mx.int32))

    def among(self, slot: int, scores: mx.array, ids: mx.array) -> mx.array:
        """As GreedyDraw; a draw uses this or `__call__` throughout."""
        weights = log_weights(scores, self.sampling)
        self._weights.append(weights)
        self._ids.append(ids)
        gumbel = self._gumbel(slot, scores.shape[1])
        return _picked(weights + mx.take_along_axis(gumbel, ids, axis=-1), ids)

    def _gumbel(self, slot: int, width: int) -> mx.array:
        positions = self.first_positions + mx.arange(slot, slot + width)
        return self.noise.draft_gumbel(positions, self.vocab.size)

    def probs(self, tokens: mx.array) -> DraftProbs:
        """q of everything drawn; greedy rows are marked as points."""
        q = mx.softmax(mx.concatenate(self._weights, axis=1), axis=-1)
        points = tuple(row.greedy for row in self.sampling)
        if self._ids:
            return Candidates(q, mx.concatenate(self._ids, axis=1), self.vocab.size, points)
        if self.vocab.d2t is None:
            return Dense(q, points)
        return MappedVocab(q, self.vocab.d2t, self.vocab.size, points)


def _picked(scores: mx.array, ids: mx.array) -> mx.array:
    best = mx.argmax(scores, axis=-1, keepdims=True)
    return mx.take_along_axis(ids, best, axis=-1)[..., 0].astype(mx.int32)


def draw_of(vocab: DraftVocab, ask: Ask, active: Sequence[int]) -> GreedyDraw | SampledDraw:
    """How the drafts of the `active` rows of an ask are drawn, each by its own sampling."""
    sampling = [ask.sampling[row] for row in active]
    if all(row.greedy for row in sampling):
        return GreedyDraw(vocab)
    noise = ask.noise if len(active) == len(ask.caps) else ask.noise.select(active)
    return SampledDraw(vocab, sampling, noise, [ask.positions[row] + 1 for row in active])


def proposal_of(
    name: str, tokens: mx.array, q: DraftProbs, lengths: Sequence[int], active: Sequence[int]
) -> Proposal:
    """The drafts `tokens` `[active, width]` of the `active` rows, and q of them, as a proposal for all rows,
    whose `lengths` are 0 for the others."""
    if len(active) < len(lengths):
        spread = [active.index(row) if row in active else 0 for row in range(len(lengths))]
        tokens, q = tokens[mx.array(spread)], q.select(spread)
    return Proposal(tokens, tuple(lengths), q, tuple(name if length else "" for length in lengths))
