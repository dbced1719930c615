"""The plain sampler, as pure functions on arrays. It is the definition that speculation has to reproduce.

It starts from logits that already carry penalties and bias, and knows nothing of histories or drafts.
Rows of different settings share a call, and a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.parting import Part
from mlx_dspark.nn.row_sampling import RowSampling


def distribution(logits: mx.array, sampling: Sequence[SamplingParams]) -> mx.array:
    """The probabilities the next token is drawn with: `[rows, width, vocab]` of any dtype to float32.

    Temperature; top-k, ties at the k-th kept; top-p over what is left, keeping each token whose more likely
    tokens have a mass below top_p; min-p, relative to the most likely. Greedy rows are one-hot at the
    arg-max, the lowest id on ties.
    """
    return mx.softmax(log_weights(logits, sampling), axis=-1)


def log_weights(logits: mx.array, sampling: Sequence[SamplingParams]) -> mx.array:
    """log of `distribution`, up to a constant per slot: 0 at the most likely token, -inf where excluded.

    The arg-max of this plus Gumbel noise is a draw from `distribution`. NaN logits give some token of the
    vocabulary and no error.
    """
    vocab, settings = logits.shape[-1], RowSampling.of(sampling)

    def weigh(candidates: int | None, part: Part) -> mx.array:
        of_kind = part.take(logits)
        if candidates is None:
            best = mx.argmax(of_kind, axis=-1, keepdims=True)
            return mx.where(mx.arange(vocab) == best, 0.0, -math.inf)
        return _sampled_weights(of_kind.astype(mx.float32), settings.of_part(part), candidates)

    return settings.by_candidates(vocab).each(weigh)


def draw(
    logits: mx.array, sampling: Sequence[SamplingParams], noise: RowNoise, positions: mx.array
) -> mx.array:
    """The plain sampler's own token at each slot: `[rows, width, vocab]` to `[rows, width]` int32.

    `positions` `[rows, width]` are those of the tokens drawn. Greedy rows need no noise and no float32 copy.
    """
    settings = RowSampling.of(sampling)

    def choose(greedy: bool, part: Part) -> mx.array:
        scores = part.take(logits)
        if not greedy:
            gumbel = noise.select(part.rows).gumbel(part.take(positions), logits.shape[-1])
            scores = log_weights(scores, settings.of_part(part)) + gumbel
        return mx.argmax(scores, axis=-1).astype(mx.int32)

    return settings.by_greed.each(choose)


def _sampled_weights(logits: mx.array, settings: RowSampling, candidates: int) -> mx.array:
    """The weights of non-greedy rows. Filters compare the logits themselves wherever they can: dividing and
    subtracting rounds, and would make ties that are not there."""
    most = mx.max(logits, axis=-1, keepdims=True)
    most = mx.where(mx.isfinite(most), most, 0.0)
    weights = (logits - most) / settings.temperature
    kept = None
    if candidates:
        kept = logits >= _least_kept(logits, weights, most, settings, candidates)
    if settings.log_min_p is not None:
        near = weights >= settings.log_min_p
        kept = near if kept is None else kept & near
    return weights if kept is None else mx.where(kept, weights, -math.inf)


def _least_kept(
    logits: mx.array,
    weights: mx.array,
    most: mx.array,
    settings: RowSampling,
    candidates: int,
) -> mx.array:
    """The smallest logit that top-k and top-p leave in, never above the largest: `[rows, width, 1]`."""
    vocab = logits.shape[-1]
    largest = logits if candidates == vocab else mx.topk(logits, candidates, axis=-1)
    ranked = mx.sort(largest, axis=-1)
    top_k = settings.top_k(vocab)
    among_k = mx.arange(candidates) >= candidates - top_k
    kth = mx.min(mx.where(among_k, ranked, math.inf), axis=-1, keepdims=True)
    if settings.top_p is None:
        return kth
    total = mx.sum(mx.where(logits >= kth, mx.exp(weights), 0.0), axis=-1, keepdims=True)
    preceding = mx.cumsum(
        mx.exp((ranked - most) / settings.temperature), axis=-1, reverse=True, inclusive=False
    )
    inside = among_k & (preceding < settings.top_p * total)
    return mx.minimum(mx.min(mx.where(inside, ranked, math.inf), axis=-1, keepdims=True), most)
