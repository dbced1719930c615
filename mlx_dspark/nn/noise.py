"""Counter-based noise: a draw depends on the row's key, the position and the purpose, and on nothing else.

So a seeded request draws the same tokens alone or in a batch, drafted or plain, and rows may come and go
between rounds. Nothing here advances: asking twice gives the same numbers.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

_TOKEN, _ACCEPT, _DRAFT = 0x746F6B65, 0x61636370, 0x64726166

_SMALLEST = 2.0**-33
"""Stands for a uniform draw of 0, whose Gumbel would be infinite; half the step of a 32-bit uniform."""

_LANES = 16
"""Vector widths divide this. A transcendental function may round its vectorised part and its left-over tail
differently; draws padded to whole vectors keep a row's noise equal bit for bit in any batch."""


def _key_of(seed: int | None) -> list[int]:
    """Two words for the counter. Hashed, since positions are added to the first: seeds 1 and 2 must not be
    one stream shifted by a token."""
    raw = secrets.token_bytes(8) if seed is None else seed.to_bytes(8, "little")
    digest = hashlib.blake2b(raw, digest_size=8, person=b"row noise").digest()
    return [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]


@dataclass(frozen=True)
class RowNoise:
    """Noise for some rows: `keys` `[rows, 2]` uint32, and which rows the user seeded.

    Positions are the absolute position of the token being generated. Threefry (Salmon et al. 2011, "Parallel
    random numbers: as easy as 1, 2, 3") is keyed by (key + position, key ^ purpose) and counts over the
    vocabulary.
    """

    keys: mx.array
    seeded: tuple[bool, ...]

    @classmethod
    def of_seeds(cls, seeds: Sequence[int | None]) -> RowNoise:
        """One row per seed, each from 0 to 2^64 - 1; None takes entropy from the operating system."""
        keys = mx.array([_key_of(seed) for seed in seeds], dtype=mx.uint32).reshape(len(seeds), 2)
        return cls(keys, tuple(seed is not None for seed in seeds))

    def select(self, rows: Sequence[int]) -> RowNoise:
        """These rows, in this order."""
        keys = mx.take(self.keys, mx.array(list(rows), dtype=mx.int32), axis=0)
        return RowNoise(keys, tuple(self.seeded[row] for row in rows))

    def joined(self, other: RowNoise) -> RowNoise:
        """These rows, then those of `other`."""
        return RowNoise(mx.concatenate([self.keys, other.keys]), self.seeded + other.seeded)

    def gumbel(self, positions: mx.array, vocab: int) -> mx.array:
        """The noise that chooses the token at each position: `[rows, width]` to `[rows, width, vocab]`.

        Float32 and finite, so a token of probability 0 is never chosen and one of probability 1 always is.
        """
        return self._gumbel(positions, vocab, _TOKEN)

    def draft_gumbel(self, positions: mx.array, vocab: int) -> mx.array:
        """What a drafter draws with; shapes as in `gumbel`.

        Seeded rows get the noise of `gumbel` itself, which makes draft and target agree as often as they can
        without knowing each other (Daliri, Musco & Musco 2024). Other rows get an independent stream, which
        rejection sampling needs.
        """
        purposes = [_TOKEN if seeded else _DRAFT for seeded in self.seeded]
        return self._gumbel(positions, vocab, mx.array(purposes, dtype=mx.uint32)[:, None])

    def uniform(self, positions: mx.array) -> mx.array:
        """For accepting the draft at each position: `[rows, width]` to `[rows, width]` float32 in [0, 1)."""
        return self._uniform(positions, 1, _ACCEPT)[..., 0]

    def _gumbel(self, positions: mx.array, vocab: int, purpose: int | mx.array) -> mx.array:
        """-log of a unit exponential. `log1p` near 0, where float32 is densest, gives the winners of the race
        all 32 bits of the uniform; `log` near 1 would leave them 24."""
        padded = -(-vocab // _LANES) * _LANES
        uniform = mx.maximum(self._uniform(positions, padded, purpose), _SMALLEST)
        return -mx.log(-mx.log1p(-uniform))[..., :vocab]

    def _uniform(self, positions: mx.array, count: int, purpose: int | mx.array) -> mx.array:
        rows, width = positions.shape
        if rows * width == 0:
            return mx.zeros((rows, width, count))
        first = self.keys[:, :1] + positions.astype(mx.uint32)
        second = self.keys[:, 1:] ^ mx.array(purpose, dtype=mx.uint32)
        folded = mx.stack([first, mx.broadcast_to(second, first.shape)], axis=-1).reshape(rows * width, 2)
        draws = mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))(folded)
        return draws.reshape(rows, width, count)
