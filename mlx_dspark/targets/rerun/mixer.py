"""Any mixer of mlx-lm that works on an ArraysCache, on a state that can be taken back.

The model's own call computes the round on a cache that holds the state's arrays. The tape is what it was
called with, and a shorter round is the same call again on less of it: exact for every recurrence, at the
price of the mixer's projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_dspark.state.recurrent import Arrays, Kept, RecurrentState, stacked

Call = Callable[..., Any]
Cut = Callable[[mx.array], mx.array]
Given = list[tuple[str | None, Any]]
"""Arguments in their order, each with its name where it was given by name."""


def rerun(call: Call, state: RecurrentState, given: Given) -> Any:
    """What `call` gives for the arguments, one of which is `state`.

    Arrays among them are of `[rows, width, ...]` or `[rows]`. A row at the beginning of its text finds an
    empty cache, which is not to every mixer what zeros are.
    """
    starting = state.starting

    def run(before: Arrays | None, cut: Cut) -> tuple[Any, Arrays]:
        cache = ArraysCache(state.slots)
        if before is not None:
            cache.cache = list(before)
        put = [(name, _put(value, state, cache, cut)) for name, value in given]
        named = {name: value for name, value in put if name is not None}
        out = call(*[value for name, value in put if name is None], **named)
        arrays = tuple(array for array in cache.cache if array is not None)
        assert len(arrays) == state.slots, "a mixer fills its cache"
        return out, arrays

    def run_row(before: Arrays, row: int, length: int | None) -> tuple[Any, Arrays]:
        of_row = tuple(array[row : row + 1] for array in before)
        return run(None if starting[row] else of_row, _cut_of(row, length))

    def run_rows(before: Arrays, length: int | None) -> tuple[Any, Arrays]:
        if len(set(starting)) == 1:
            return run(None if starting[0] else before, lambda array: _first(array, length))
        parts = [run_row(before, row, length) for row in range(len(starting))]
        return _concatenated([out for out, _ in parts]), stacked([after for _, after in parts])

    out, after = run_rows(() if state.untouched else state.before(), None)
    if state.untouched:
        state.before(*((array.shape[1:], array.dtype) for array in after))

    def replay(before: Arrays, kept: Kept) -> Arrays:
        if kept.level:
            return run_rows(before, kept.longest)[1]
        rows = [
            run_row(before, row, length)[1] if length else tuple(array[row : row + 1] for array in before)
            for row, length in enumerate(kept.lengths)
        ]
        return stacked(rows)

    state.write(after, replay)
    return out


def _first(array: mx.array, length: int | None) -> mx.array:
    """The first `length` positions, or all of them."""
    return array if length is None or array.ndim == 1 else array[:, :length]


def _cut_of(row: int, length: int | None) -> Cut:
    return lambda array: _first(array[row : row + 1], length)


def _concatenated(outs: list[Any]) -> Any:
    """What a mixer gives for several rows, from what it gives for each."""
    if isinstance(outs[0], tuple):
        return tuple(_concatenated(list(parts)) for parts in zip(*outs, strict=True))
    return mx.concatenate(outs)


def _put(value: Any, state: RecurrentState, cache: ArraysCache, cut: Cut) -> Any:
    if value is state:
        return cache
    return cut(value) if isinstance(value, mx.array) else value
