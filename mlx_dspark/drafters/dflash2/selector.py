"""The choice of a path through a block: few candidates per slot, scored by the draft before."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.catalog.formats.base import Selector

GROUP = 64
"""Neighbouring ids that are compared by their maximum first: a partition costs far more than a maximum."""


class CandidateSelector(nn.Module):
    """Adds to a candidate's logit how well it follows the token before, given the slot's hidden state."""

    def __init__(self, shape: Selector, vocab: int, hidden: int) -> None:
        super().__init__()
        self.predecessor_codebook = mx.zeros((vocab, shape.rank))
        self.successor_codebook = mx.zeros((vocab, shape.rank))
        self.hidden_projection = nn.Linear(hidden, shape.rank, bias=False)

    def successors(self, hidden: mx.array, ids: mx.array) -> mx.array:
        """What each candidate listens for: `[rows, width, n, rank]`, from slots `[rows, width, hidden]` and
        their candidates `ids` `[rows, width, n]`."""
        return self.hidden_projection(hidden)[:, :, None] * self.successor_codebook[ids]

    def follow(self, previous: mx.array, successors: mx.array) -> mx.array:
        """How well one slot's `successors` `[rows, n, rank]` follow the tokens `previous` `[rows]`: float32
        `[rows, 1, n]`."""
        bilinear = successors @ self.predecessor_codebook[previous][:, :, None]
        return bilinear[:, None, :, 0].astype(mx.float32)


def best_candidates(logits: mx.array, count: int) -> mx.array:
    """Ids of the `count` largest logits `[..., vocab]`, ascending; of equal ones the lower ids are taken."""
    vocab = logits.shape[-1]
    groups = -(-vocab // GROUP)
    if groups <= count:
        return _largest(logits, count)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, groups * GROUP - vocab)]
    padded = mx.pad(logits, padding, constant_values=-math.inf)
    maxima = padded.reshape(*logits.shape[:-1], groups, GROUP).max(axis=-1)
    ids = (_largest(maxima, count)[..., None] * GROUP + mx.arange(GROUP)).flatten(-2)
    among = _largest(mx.take_along_axis(padded, ids, axis=-1), count)
    return mx.minimum(mx.take_along_axis(ids, among, axis=-1), vocab - 1)


def _largest(values: mx.array, count: int) -> mx.array:
    """As `best_candidates`. A partition puts equal values in any order, so it is done over distinct keys."""
    size = values.shape[-1]
    least = mx.min(mx.topk(values, count, axis=-1), axis=-1, keepdims=True)
    ids = mx.arange(size)
    keys = mx.where(values > least, ids - 2 * size, mx.where(values == least, ids - size, 0))
    return mx.sort(mx.argpartition(keys, count - 1, axis=-1)[..., :count], axis=-1).astype(mx.int32)
