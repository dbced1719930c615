"""The plain sampler, as pure functions on arrays. It is the definition that speculation has to reproduce.

It starts from logits that already carry penalties and bias, and knows nothing of histories or drafts.
Rows of different settings share a call, and a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import mlx.core as mx

from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.noise import RowNoise

_FEWEST_CANDIDATES = 64


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
    vocab = logits.shape[-1]
    kinds = [None if row.greedy else _candidates(row, vocab) for row in sampling]

    def weigh(rows: Sequence[int]) -> mx.array:
        count = kinds[rows[0]]
        of_kind = take_rows(logits, rows)
        if count is None:
            best = mx.argmax(of_kind, axis=-1, keepdims=True)
            return mx.where(mx.arange(vocab) == best, 0.0, -math.inf)
        return _sampled_weights(of_kind.astype(mx.float32), [sampling[row] for row in rows], count)

    return by_kind(kinds, weigh)


def draw(
    logits: mx.array, sampling: Sequence[SamplingParams], noise: RowNoise, positions: mx.array
) -> mx.array:
    """The plain sampler's own token at each slot: `[rows, width, vocab]` to `[rows, width]` int32.

    `positions` `[rows, width]` are those of the tokens drawn. Greedy rows need no noise and no float32 copy.
    """
    greedy = [row.greedy for row in sampling]

    def choose(rows: Sequence[int]) -> mx.array:
        scores = take_rows(logits, rows)
        if not greedy[rows[0]]:
            gumbel = noise.select(rows).gumbel(take_rows(positions, rows), logits.shape[-1])
            scores = log_weights(scores, [sampling[row] for row in rows]) + gumbel
        return mx.argmax(scores, axis=-1).astype(mx.int32)

    return by_kind(greedy, choose)


def take_rows(values: mx.array, rows: Sequence[int]) -> mx.array:
    """These rows of `values`; `values` itself when that is all of them."""
    if list(rows) == list(range(values.shape[0])):
        return values
    return mx.take(values, mx.array(list(rows), dtype=mx.int32), axis=0)


def by_kind(kinds: Sequence[Hashable], compute: Callable[[Sequence[int]], mx.array]) -> mx.array:
    """`compute` once for the rows of each kind, and the results back in row order."""
    rows_of_kind: dict[Hashable, list[int]] = {}
    for row, kind in enumerate(kinds):
        rows_of_kind.setdefault(kind, []).append(row)
    results = [compute(rows) for rows in rows_of_kind.values()]
    if len(results) == 1:
        return results[0]
    order = [row for rows in rows_of_kind.values() for row in rows]
    return take_rows(mx.concatenate(results), sorted(range(len(order)), key=order.__getitem__))


def _active_top_k(row: SamplingParams, vocab: int) -> int:
    """top_k, or the whole vocabulary when it is off or larger."""
    return min(row.top_k or vocab, vocab)


def _candidates(row: SamplingParams, vocab: int) -> int:
    """How many of the largest logits must be put in order: 0 when no filter needs any.

    A power of two, so that near-equal settings share a call, or the whole vocabulary, where a partial sort
    would save nothing.
    """
    top_k = _active_top_k(row, vocab)
    if top_k == vocab:
        return 0 if row.top_p >= 1 else vocab
    count = max(_FEWEST_CANDIDATES, 1 << (top_k - 1).bit_length())
    return count if 4 * count <= vocab else vocab


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None, None]


def _sampled_weights(logits: mx.array, sampling: Sequence[SamplingParams], candidates: int) -> mx.array:
    """The weights of non-greedy rows. Filters compare the logits themselves wherever they can: dividing and
    subtracting rounds, and would make ties that are not there."""
    temperature = _column([row.temperature for row in sampling])
    most = mx.max(logits, axis=-1, keepdims=True)
    most = mx.where(mx.isfinite(most), most, 0.0)
    weights = (logits - most) / temperature
    kept = None
    if candidates:
        kept = logits >= _least_kept(logits, weights, most, temperature, sampling, candidates)
    if any(row.min_p > 0 for row in sampling):
        near = weights >= _column([math.log(row.min_p) if row.min_p > 0 else -math.inf for row in sampling])
        kept = near if kept is None else kept & near
    return weights if kept is None else mx.where(kept, weights, -math.inf)


def _least_kept(
    logits: mx.array,
    weights: mx.array,
    most: mx.array,
    temperature: mx.array,
    sampling: Sequence[SamplingParams],
    candidates: int,
) -> mx.array:
    """The smallest logit that top-k and top-p leave in, never above the largest: `[rows, width, 1]`."""
    vocab = logits.shape[-1]
    largest = logits if candidates == vocab else mx.topk(logits, candidates, axis=-1)
    ranked = mx.sort(largest, axis=-1)
    top_k = mx.array([_active_top_k(row, vocab) for row in sampling])[:, None, None]
    among_k = mx.arange(candidates) >= candidates - top_k
    kth = mx.min(mx.where(among_k, ranked, math.inf), axis=-1, keepdims=True)
    if all(row.top_p >= 1 for row in sampling):
        return kth
    top_p = _column([row.top_p if row.top_p < 1 else math.inf for row in sampling])
    total = mx.sum(mx.where(logits >= kth, mx.exp(weights), 0.0), axis=-1, keepdims=True)
    preceding = mx.cumsum(mx.exp((ranked - most) / temperature), axis=-1, reverse=True, inclusive=False)
    inside = among_k & (preceding < top_p * total)
    return mx.minimum(mx.min(mx.where(inside, ranked, math.inf), axis=-1, keepdims=True), most)
