"""Rows of a batch that want different treatment, each kind computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx


class Part:
    """Some rows of a batch, in ascending order."""

    def __init__(self, rows: Sequence[int], whole: bool) -> None:
        self.rows = rows
        self._index = None if whole else mx.array(list(rows), dtype=mx.int32)

    @property
    def whole(self) -> bool:
        """Whether it is all the rows of the batch."""
        return self._index is None

    def take(self, values: mx.array) -> mx.array:
        """These rows of `values`; `values` itself when that is all of them."""
        return values if self._index is None else mx.take(values, self._index, axis=0)

    def pick(self, items: Sequence[Any]) -> list[Any]:
        """The items of these rows."""
        return [items[row] for row in self.rows]


class Parting:
    """The rows of a batch parted by `kinds`, one per row."""

    def __init__(self, kinds: Sequence[Hashable]) -> None:
        rows_of_kind: dict[Hashable, list[int]] = {}
        for row, kind in enumerate(kinds):
            rows_of_kind.setdefault(kind, []).append(row)
        whole = len(rows_of_kind) == 1
        self._parts = [(kind, Part(rows, whole)) for kind, rows in rows_of_kind.items()]
        order = [row for rows in rows_of_kind.values() for row in rows]
        back = sorted(range(len(order)), key=order.__getitem__)
        self._back = None if whole else mx.array(back, dtype=mx.int32)

    def each(self, compute: Callable[[Any, Part], mx.array]) -> mx.array:
        """`compute` of every kind and its rows, and the results back in row order."""
        results = [compute(kind, part) for kind, part in self._parts]
        return results[0] if self._back is None else mx.take(mx.concatenate(results), self._back, axis=0)
