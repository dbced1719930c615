"""What every kind of layer state promises.

A state holds rows. A round opens a transaction with `begin(span)`, the model writes the span's positions, and
`commit(keep)` keeps the first `keep[row]` of them. Several transactions may be open; they close first in,
first out, and each starts from the assumption that those before it keep everything. How deep each row is
filled, and how many may be open, is kept once for all layers, in `RowStates`.

Laws, for every kind:
1. feeding `w` and committing `k` equals feeding and committing the first `k`;
2. committing 0 equals nothing happened;
3. commits compose;
4. rows do not see each other;
5. a capture is unmoved by later writes;
6. join, select, replace, capture and restore are inverse where they should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx


class Span:
    """The `width` positions per row that a round writes, those of row `r` from `base[r]` on.

    The layers of a batch share it, so what they read off it is worked out once a round.
    """

    def __init__(self, base: list[int], width: int) -> None:
        self.base = base
        self.width = width
        self.shared: dict[Any, Any] = {}
        """What a kind of layer works out once for all its layers."""

    @cached_property
    def end(self) -> int:
        """Where the deepest row's positions end."""
        return max(self.base) + self.width

    @cached_property
    def level(self) -> bool:
        """Whether all rows write at the same place."""
        return min(self.base) + self.width == self.end

    @cached_property
    def offset(self) -> int | mx.array:
        """`base` as mlx-lm's model code wants it: a number for one row, int32 `[rows]` for several."""
        return self.base[0] if len(self.base) == 1 else mx.array(self.base, dtype=mx.int32)

    @cached_property
    def positions(self) -> mx.array:
        """The positions written: int32 `[rows, 1, width, 1]`."""
        return (mx.array(self.base, dtype=mx.int32)[:, None] + mx.arange(self.width))[:, None, :, None]


@dataclass(frozen=True, slots=True)
class LayerCapture:
    """One row of one layer at one moment: arrays of its own, which nothing writes to.

    It can be restored at no depth below `least` but 0.
    """

    arrays: tuple[mx.array, ...]
    depth: int
    least: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class LayerState(Protocol):
    """One layer's memory for some rows. Model code sees it as an mlx-lm cache."""

    def begin(self, span: Span) -> None:
        """Open a transaction in which the positions of `span` will be written."""
        ...

    def commit(self, keep: Sequence[int]) -> None:
        """Close the oldest transaction: row `r` keeps its first `keep[r]` positions, 0 to `width`."""
        ...

    def rollback(self) -> None:
        """Drop every open transaction."""
        ...

    def join(self, other: Any) -> None:
        """Append the rows of `other`, a state of the same kind, which must not be used afterwards."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        ...

    def replace(self, rows: Sequence[int], other: Any) -> None:
        """The rows of `other`, which is as for `join`, take the places of these rows, in this order."""
        ...

    def capture(self, row: int, depth: int) -> LayerCapture:
        """The content of a row of `depth` committed tokens."""
        ...

    def restore(self, row: int, capture: LayerCapture, to: int) -> None:
        """Make the row what it was at depth `to`, which `rewindable` must have named."""
        ...

    def rewindable(self, depth: int, to: int) -> int:
        """The furthest depth, at most `to`, that a capture of depth `depth` can be restored at."""
        ...

    def arrays(self) -> list[mx.array]:
        """Every array held, for evaluation."""
        ...
