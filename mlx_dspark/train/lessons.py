"""What the target has to say about a batch: the features a drafter reads, and logits to learn from.

Where the target computes as it goes (CPU kernels) gradients cannot flow through its modules and `mx.compile`
cannot see them. Its logits are then computed with its forward, and a drafter that borrows its tables gets
them as plain arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx
import numpy as np

from mlx_dspark.contracts import Forward, Logits, Target, TargetSpec
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.train.forward import picked
from mlx_dspark.train.product import product


class Lessons(ABC):
    """Features, and logits in an order of the vocabulary that begins with the draft vocabulary.

    `ids` are the target ids of a reduced draft vocabulary.
    """

    def __init__(self, target: DenseTarget, taps: tuple[int, ...], ids: mx.array | None) -> None:
        self.target, self.taps = target, taps
        self._order = self._positions = None
        if ids is not None:
            kept = np.array(ids)
            self._order = np.concatenate([kept, np.setdiff1d(np.arange(target.spec.vocab), kept)])
            self._positions = mx.array(np.argsort(self._order).astype(np.int32))

    @abstractmethod
    def taught(self, tokens: mx.array, at: mx.array) -> tuple[mx.array, mx.array]:
        """Of sequences `[rows, width]` the features `[rows, width, taps * hidden]`, and of the positions `at`
        `[rows, n]` in them what `logits` turns into logits: `[rows, n, ...]`."""

    @abstractmethod
    def logits(self, seen: mx.array) -> mx.array:
        """`[..., vocab]` for what was seen at some positions."""

    def positions(self, tokens: mx.array) -> mx.array:
        """Where target ids stand in the order."""
        return tokens if self._positions is None else self._positions[tokens]


class GraphLessons(Lessons):
    """Of a target that only builds a graph: its head is applied where the logits are used.

    For a reduced draft vocabulary the head's rows are put in order once, which costs a dense copy of them and
    spares a gather over all logits at every step.
    """

    def __init__(self, target: DenseTarget, taps: tuple[int, ...], ids: mx.array | None) -> None:
        super().__init__(target, taps, ids)
        self._rows = None
        if self._order is not None:
            dtype = target.features(mx.array([[0]]), (-1,))[1].dtype
            head = target.unembed(mx.eye(target.spec.hidden, dtype=dtype)).T
            self._rows = mx.contiguous(head[mx.array(self._order)])
            mx.eval(self._rows)

    def taught(self, tokens: mx.array, at: mx.array) -> tuple[mx.array, mx.array]:
        features, hidden = self.target.features(tokens, self.taps)
        return features, picked(hidden, at)

    def logits(self, seen: mx.array) -> mx.array:
        return self.target.unembed(seen) if self._rows is None else seen @ self._rows.T


class KernelLessons(Lessons):
    """Of a target that computes as it goes: logits come with the forward, through its own kernels."""

    def taught(self, tokens: mx.array, at: mx.array) -> tuple[mx.array, mx.array]:
        rows = self.target.new_rows(len(tokens))
        with rows.transaction(tokens.shape[1]):
            out = self.target.forward(tokens, rows, taps=self.taps, logits=at)
        assert out.features is not None
        assert out.logits is not None
        if self._order is None:
            return out.features, out.logits
        return out.features, mx.array(np.take(np.array(out.logits, copy=False), self._order, axis=-1))

    def logits(self, seen: mx.array) -> mx.array:
        return seen


def lessons(target: DenseTarget, taps: tuple[int, ...], ids: mx.array | None) -> Lessons:
    """The lessons of `target`, whichever way it computes."""
    return (GraphLessons if target.spec.lazy else KernelLessons)(target, taps, ids)


class PlainTables(Target):
    """A target whose embedding, head or both are float32 arrays, for a drafter that borrows them."""

    def __init__(self, target: DenseTarget, *, embedding: bool, head: bool) -> None:
        self._target = target
        self._embedding = target.embed(mx.arange(target.spec.vocab)) if embedding else None
        self._head = mx.contiguous(target.unembed(mx.eye(target.spec.hidden)).T) if head else None
        mx.eval([table for table in (self._embedding, self._head) if table is not None])

    @property
    def spec(self) -> TargetSpec:
        return self._target.spec

    def new_rows(self, n: int = 1, *, rectangle: bool = False) -> RowStates:
        return self._target.new_rows(n, rectangle=rectangle)

    def forward(
        self,
        tokens: mx.array,
        rows: RowStates,
        *,
        taps: tuple[int, ...] = (),
        logits: Logits | mx.array = Logits.ALL,
    ) -> Forward:
        return self._target.forward(tokens, rows, taps=taps, logits=logits)

    def embed(self, tokens: mx.array) -> mx.array:
        return self._target.embed(tokens) if self._embedding is None else self._embedding[tokens]

    def unembed(self, hidden: mx.array) -> mx.array:
        return self._target.unembed(hidden) if self._head is None else product(hidden, self._head)
