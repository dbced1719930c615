"""The sampling settings of the rows of a batch, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import overload

import mlx.core as mx

from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.parting import Part, Parting

_FEWEST_CANDIDATES = 64


class RowSampling(Sequence[SamplingParams]):
    """The settings of some rows, and what follows from them, worked out when first asked.

    Kept for as long as the rows of a batch stay the same: with many rows, going through their settings every
    round would cost more than the round. Functions that take a sequence of settings take this as one.
    """

    def __init__(self, rows: Iterable[SamplingParams]) -> None:
        self._rows = tuple(rows)
        self._by_candidates: dict[int, Parting] = {}
        self._of_part: dict[Part, RowSampling] = {}

    @classmethod
    def of(cls, rows: Sequence[SamplingParams]) -> RowSampling:
        return rows if isinstance(rows, cls) else cls(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> SamplingParams: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SamplingParams]: ...
    def __getitem__(self, index: int | slice) -> SamplingParams | Sequence[SamplingParams]:
        return self._rows[index]

    def of_part(self, part: Part) -> RowSampling:
        """Those of some of the rows."""
        if part.whole:
            return self
        if part not in self._of_part:
            self._of_part[part] = RowSampling(part.pick(self._rows))
        return self._of_part[part]

    @cached_property
    def just_greedy(self) -> bool:
        """Whether every row wants the arg-max and no log-probability."""
        return all(row.greedy and row.logprobs is None for row in self._rows)

    @cached_property
    def by_greed(self) -> Parting:
        return Parting([row.greedy for row in self._rows])

    @cached_property
    def by_penalty(self) -> Parting | None:
        """By whether a row is penalised; None when none is."""
        penalised = [row.penalised for row in self._rows]
        return Parting(penalised) if any(penalised) else None

    @cached_property
    def biases(self) -> list[tuple[int, int, float]]:
        """Row, token and bias, of all logit biases."""
        return [
            (r, token, bias) for r, row in enumerate(self._rows) for token, bias in row.logit_bias.items()
        ]

    @cached_property
    def most_logprobs(self) -> int | None:
        """The most likely tokens to report beside the chosen one; None when no row asked for any report."""
        return max((row.logprobs for row in self._rows if row.logprobs is not None), default=None)

    def by_candidates(self, vocab: int) -> Parting:
        """By how many of the largest logits must be put in order; None for greedy rows."""
        if vocab not in self._by_candidates:
            kinds = [None if row.greedy else _candidates(row, vocab) for row in self._rows]
            self._by_candidates[vocab] = Parting(kinds)
        return self._by_candidates[vocab]

    def top_k(self, vocab: int) -> mx.array:
        """`[rows, 1, 1]`; the whole vocabulary where off."""
        return mx.array([_active_top_k(row, vocab) for row in self._rows])[:, None, None]

    @cached_property
    def temperature(self) -> mx.array:
        """`[rows, 1, 1]`."""
        return _column([row.temperature for row in self._rows])

    @cached_property
    def log_min_p(self) -> mx.array | None:
        """`[rows, 1, 1]`; None when min-p is off in every row."""
        if not any(row.min_p > 0 for row in self._rows):
            return None
        return _column([math.log(row.min_p) if row.min_p > 0 else -math.inf for row in self._rows])

    @cached_property
    def top_p(self) -> mx.array | None:
        """`[rows, 1, 1]`, infinite where off; None when it is off in every row."""
        if all(row.top_p >= 1 for row in self._rows):
            return None
        return _column([row.top_p if row.top_p < 1 else math.inf for row in self._rows])


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
