"""Which sequences and anchors each step sees: a function of the seed and the step's number alone.

A run that was interrupted therefore goes on with the batches it would have seen.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_dspark.train.data import TokenStore

WIDTH_STEP = 64
"""Batches are as wide as their longest sequence, rounded up to this; few widths mean few compilations."""

POOL = 32
"""Batches whose sequences are sorted by length together."""

MOST_HELD_OUT = 8
"""Batches of held-out sequences."""

FEW_HELD_OUT = 8
"""Held-out sequences of a small store, though no more than one in five."""

AHEAD = 4
"""Batches made before they are asked for."""

ORDER, ANCHORS, HELD_OUT = range(3)
"""Streams of random numbers."""


class Batch(NamedTuple):
    """`tokens` `[rows, width]` padded with zeros, `lengths` `[rows]`, `anchors` `[rows, n]` in rising order.

    A row without room for a block has its anchors at its last token, where no slot is valid.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    anchors: NDArray[np.int32]


class Batches:
    """Batches of `rows` sequences of `store`, each with `anchors` blocks.

    Sequences are cut to `width` tokens: the end of the answer goes first, of a prompt that takes more than
    two thirds its beginning. One in fifty sequences, up to eight batches, is held out, of a small
    store one in five. A store that is too small for one batch is repeated.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        rows: int,
        width: int,
        anchors: int,
        seed: int,
    ) -> None:
        self.rows, self.width, self.anchors, self.seed = rows, width, anchors, seed
        self._store = store
        whole, prompt = store.lengths().T
        begin = np.where(whole > width, np.maximum(prompt - 2 * width // 3, 0), 0)
        self._lengths = np.minimum(whole - begin, width)
        order = self._random(HELD_OUT, 0).permutation(len(store))
        held_out = max(len(store) // 50, min(FEW_HELD_OUT, len(store) // 5))
        held_out = min(held_out, MOST_HELD_OUT * rows)
        self._held_out, self._trained = order[:held_out], np.sort(order[held_out:])
        self._epoch: tuple[int, list[NDArray[np.int64]]] = (-1, [])

    @property
    def sequences(self) -> int:
        """Sequences that are trained on."""
        return len(self._trained)

    @property
    def per_epoch(self) -> int:
        """Steps in which every training sequence is seen once, the last few of an epoch left out."""
        return max(1, len(self._trained) // self.rows)

    def batch(self, step: int) -> Batch:
        """The batch of step `step`, counted from 0."""
        epoch, within = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self._make(self._epoch[1][within], self._random(ANCHORS, step))

    def stream(self, step: int) -> Generator[Batch, None, None]:
        """The batches from `step` on, made ahead in a thread."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            waiting: list[Future[Batch]] = []
            try:
                while True:
                    while len(waiting) < AHEAD:
                        waiting.append(pool.submit(self.batch, step + len(waiting)))
                    yield waiting.pop(0).result()
                    step += 1
            finally:
                for future in waiting:
                    future.cancel()

    def held_out(self) -> list[Batch]:
        """The held-out sequences, always with the same anchors."""
        rng = self._random(HELD_OUT, 1)
        return [
            self._make(self._held_out[start : start + self.rows], rng)
            for start in range(0, len(self._held_out), self.rows)
        ]

    def held_out_prompts(self) -> list[tuple[int, ...]]:
        """Prompts of the held-out sequences."""
        sequences = (self._store.sequence(int(index)) for index in self._held_out)
        return [tuple(map(int, ids[:prompt])) for ids, prompt in sequences]

    def _order(self, epoch: int) -> list[NDArray[np.int64]]:
        """Batches of sequences of like length, in random order."""
        rng = self._random(ORDER, epoch)
        order = rng.permutation(np.resize(self._trained, max(len(self._trained), self.rows)))
        batches = []
        for start in range(0, self.per_epoch * self.rows, POOL * self.rows):
            pool = order[start : min(start + POOL * self.rows, self.per_epoch * self.rows)]
            pool = pool[np.argsort(self._lengths[pool], kind="stable")]
            batches += list(pool.reshape(-1, self.rows))
        return [batches[i] for i in rng.permutation(len(batches))]

    def _make(self, indices: NDArray[np.int64], rng: np.random.Generator) -> Batch:
        cut = [self._cut(int(index)) for index in indices]
        lengths = np.array([len(ids) for ids, _ in cut], dtype=np.int32)
        width = -(-int(lengths.max()) // WIDTH_STEP) * WIDTH_STEP
        tokens = np.zeros((len(cut), width), dtype=np.int32)
        for row, (ids, _) in zip(tokens, cut, strict=True):
            row[: len(ids)] = ids
        first = np.array([prompt for _, prompt in cut], dtype=np.int32)
        anchors = self._spread(first, lengths, rng)
        return Batch(tokens, lengths, anchors)

    def _spread(
        self, first: NDArray[np.int32], lengths: NDArray[np.int32], rng: np.random.Generator
    ) -> NDArray[np.int32]:
        """One anchor in each of equal parts of the answer, so that none is crowded: `[rows, anchors]`."""
        room = np.maximum(lengths - 1 - first, 0)[:, None]
        parts = (np.arange(self.anchors) + rng.random((len(first), self.anchors))) / self.anchors
        spread = first[:, None] + np.minimum((parts * room).astype(np.int32), room - 1)
        return np.where(room > 0, spread, lengths[:, None] - 1).astype(np.int32)

    def _cut(self, index: int) -> tuple[NDArray[np.uint32], int]:
        ids, prompt = self._store.sequence(index)
        begin = max(0, prompt - 2 * self.width // 3) if len(ids) > self.width else 0
        return ids[begin : begin + self.width], prompt - begin

    def _random(self, stream: int, counter: int) -> np.random.Generator:
        return np.random.Generator(
            np.random.Philox(key=np.array([self.seed, (stream << 32) + counter], np.uint64))
        )
