"""What every kind of layer state promises.

A state holds rows. A round opens a transaction with `begin(width)`, the model writes `width` positions per
row, and `commit(keep)` keeps the first `keep[row]` of them. At most two transactions are open; they close
first in, first out, and the second starts from the assumption that the first keeps everything.

Laws, for every kind:
1. feeding `w` and committing `k` equals feeding and committing the first `k`;
2. committing 0 equals nothing happened;
3. commits compose;
4. rows do not see each other;
5. a capture is unmoved by later writes;
6. join, select, capture and restore are inverse where they should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class LayerCapture:
    """One row of one layer at one moment: arrays of its own, which nothing writes to."""

    arrays: tuple[mx.array, ...]
    depth: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class LayerState(Protocol):
    """One layer's memory for some rows. Model code sees it as an mlx-lm cache."""

    def begin(self, width: int) -> None:
        """Open a transaction in which `width` positions per row will be written."""
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

    def capture(self, row: int) -> LayerCapture:
        """The committed content of a row."""
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
