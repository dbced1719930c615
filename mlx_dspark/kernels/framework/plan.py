"""Which kernel serves how many rows of one matrix, or how many queries of one attention.

A plan belongs to one loaded model, and so does the switchboard that its plans share: what is switched off
there is switched off nowhere else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import mlx.core as mx

from mlx_dspark.kernels.framework.kernel import (
    AttentionKernel,
    ExpertsKernel,
    Geometry,
    MatrixKernel,
    TogetherKernel,
)

K = TypeVar("K", bound="MatrixKernel | AttentionKernel")


class Switchboard:
    """The kernels that were switched off since the model was loaded, each with the reason."""

    def __init__(self) -> None:
        self.off: dict[str, str] = {}
        self._told: list[Callable[[], None]] = []

    def tell(self, forget: Callable[[], None]) -> None:
        """Call `forget` whenever something is switched off."""
        self._told.append(forget)

    def switch_off(self, name: str, reason: str) -> None:
        if name not in self.off:
            self.off[name] = reason
            for forget in self._told:
                forget()


@dataclass(frozen=True)
class Choice(Generic[K]):
    """A kernel and how it is launched. What else it can do is asked once: that costs as much as a launch."""

    kernel: K
    geometry: Geometry

    @cached_property
    def together(self) -> TogetherKernel | None:
        """The kernel, where it multiplies with several matrices by one launch."""
        return self.kernel if isinstance(self.kernel, TogetherKernel) else None

    @cached_property
    def experts(self) -> ExpertsKernel | None:
        """The kernel, where it multiplies with the matrices of experts."""
        return self.kernel if isinstance(self.kernel, ExpertsKernel) else None


@dataclass(frozen=True)
class Admitted(Generic[K]):
    """A kernel with the widths that it was tried at, rising, and the launches of those it was admitted at;
    `beside` has the launches of those at which it is worth one only together with others."""

    kernel: K
    tried: Sequence[int]
    geometries: Mapping[int, Geometry]
    beside: Mapping[int, Geometry] = field(default_factory=dict)

    @property
    def placed(self) -> Mapping[int, Geometry]:
        """All of its launches."""
        return {**self.geometries, **self.beside}

    def at(self, width: int) -> Geometry | None:
        """The launch for so many rows; None where they are not served.

        Between two widths that were tried both must have been admitted; below the first and beyond the last
        none is.
        """
        return self._at(width, self.geometries)

    def at_beside(self, width: int) -> Geometry | None:
        """The same for one launch together with others that are served."""
        return self._at(width, self.placed)

    def _at(self, width: int, geometries: Mapping[int, Geometry]) -> Geometry | None:
        place = bisect_left(self.tried, width)
        if place == len(self.tried):
            return None
        wider = self.tried[place]
        if wider != width and (not place or self.tried[place - 1] not in geometries):
            return None
        return geometries.get(wider)


@dataclass
class RowPlan:
    """Kernels of one matrix, the first that serves a number of rows serves it."""

    kernels: Sequence[Admitted[MatrixKernel]]
    dtype: mx.Dtype
    board: Switchboard
    _known: dict[int, Choice[MatrixKernel] | None] = field(default_factory=dict)
    _beside: dict[int, Choice[MatrixKernel] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.board.tell(self._forget)

    def at(self, rows: int) -> Choice[MatrixKernel] | None:
        known = self._known
        if rows not in known:
            known[rows] = _first(self.kernels, rows, self.board)
        return known[rows]

    def at_beside(self, rows: int) -> Choice[MatrixKernel] | None:
        """What serves so many rows in one launch with other matrices."""
        known = self._beside
        if rows not in known:
            known[rows] = self.at(rows) or _first(self.kernels, rows, self.board, beside=True)
        return known[rows]

    def _forget(self) -> None:
        self._known, self._beside = {}, {}


@dataclass
class QueryPlan:
    """Kernels of one attention: for each the lengths that it was tried at, rising, with what was admitted
    there. A length serves from there up to the next one."""

    kernels: Sequence[tuple[Sequence[int], Sequence[Admitted[AttentionKernel]]]]
    board: Switchboard
    _known: dict[tuple[int, int], Choice[AttentionKernel] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.board.tell(self._forget)
        self._edges = sorted({length for lengths, _ in self.kernels for length in lengths})

    def at(self, width: int, length: int) -> Choice[AttentionKernel] | None:
        known, key = self._known, (width, bisect_right(self._edges, length))
        if key not in known:
            known[key] = self._find(width, length)
        return known[key]

    def _find(self, width: int, length: int) -> Choice[AttentionKernel] | None:
        serving = []
        for lengths, admitted in self.kernels:
            place = bisect_right(lengths, length)
            if place:
                serving.append(admitted[place - 1])
        return _first(serving, width, self.board)

    def _forget(self) -> None:
        self._known = {}


def _first(
    kernels: Sequence[Admitted[K]], width: int, board: Switchboard, beside: bool = False
) -> Choice[K] | None:
    for each in kernels:
        geometry = each.at_beside(width) if beside else each.at(width)
        if geometry is not None and each.kernel.name not in board.off:
            return Choice(each.kernel, geometry)
    return None
