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
Given = list[tuple[str | None, Any]]
"""Arguments in their order, each with its name where it was given by name."""


def rerun(call: Call, state: RecurrentState, given: Given) -> Any:
    """What `call` gives for the arguments, one of which is `state`.

    Arrays among them are of `[rows, width, ...]` or `[rows]`.
    """

    def run(before: Arrays | None, cut: Callable[[mx.array], mx.array]) -> tuple[Any, Arrays]:
        cache = ArraysCache(state.slots)
        if before is not None:
            cache.cache = list(before)
        put = [(name, _put(value, state, cache, cut)) for name, value in given]
        named = {name: value for name, value in put if name is not None}
        out = call(*[value for name, value in put if name is None], **named)
        arrays = tuple(array for array in cache.cache if array is not None)
        assert len(arrays) == state.slots, "a mixer fills its cache"
        return out, arrays

    untouched = state.untouched
    out, after = run(None if untouched else state.before(), lambda array: array)
    if untouched:
        state.before(*((array.shape[1:], array.dtype) for array in after))

    def replay(before: Arrays, kept: Kept) -> Arrays:
        if kept.level:
            return run(before, lambda array: array[:, : kept.longest] if array.ndim > 1 else array)[1]
        rows = []
        for row, length in enumerate(kept.lengths):
            of_row = tuple(array[row : row + 1] for array in before)
            rows.append(run(of_row, _cut_of(row, length))[1] if length else of_row)
        return stacked(rows)

    state.write(after, replay)
    return out


def _cut_of(row: int, length: int) -> Callable[[mx.array], mx.array]:
    def cut(array: mx.array) -> mx.array:
        of_row = array[row : row + 1]
        return of_row[:, :length] if array.ndim > 1 else of_row

    return cut


def _put(value: Any, state: RecurrentState, cache: ArraysCache, cut: Callable[[mx.array], mx.array]) -> Any:
    if value is state:
        return cache
    return cut(value) if isinstance(value, mx.array) else value
