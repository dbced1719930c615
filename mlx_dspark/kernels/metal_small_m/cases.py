"""Which matrices the kernel takes, and how a launch is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.shapes import MatrixShape

BITS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
HALVES = (mx.float16, mx.bfloat16)
MOST_ROWS = 16
MOST_THREADGROUP_BYTES = 32 * 1024
BLOCK = 64
"""Numbers of a row that a simdgroup takes at a time."""

_FEWEST_WORDS = 8
"""MLX hands smaller inputs over in another address space."""
_MOST_WORDS = 1 << 31
"""Halves of words are counted in 32 bits."""
_LAYOUTS = ((4, 4), (4, 8), (2, 8), (8, 4), (8, 8), (2, 4), (4, 2), (8, 2), (2, 2))
_HALF_LAYOUTS = ((4, 4), (8, 4), (4, 8))


class SmallMGeometry(NamedTuple):
    """A threadgroup takes `tiles` x 8 weight rows; its `simdgroups` share the numbers of a row. `operand`
    is the type in which tiles are multiplied; sums are float32 always."""

    tiles: int
    simdgroups: int
    operand: str

    @property
    def threads(self) -> int:
        return 32 * self.simdgroups

    def threadgroup_bytes(self, rows: int) -> int:
        """Of threadgroup memory, for so many rows of x."""
        return 4 * self.simdgroups * 8 * self.tiles * 8 * row_tiles(rows)


def row_tiles(rows: int) -> int:
    """Tiles of 8 rows of x."""
    return 1 if rows <= 8 else 2


def refusal(source: Source, dtype: mx.Dtype) -> str | None:
    """Why the kernel does not take these codes with x of this type; None where it does."""
    if not source.bits or source.scales is None or source.biases is None or source.mode != "affine":
        return "it is not of affine codes"
    if source.bits not in BITS or source.group_size not in GROUPS:
        return f"it is of {source.bits} bits in groups of {source.group_size}"
    if dtype not in HALVES or source.scales.dtype != dtype or source.biases.dtype != dtype:
        return f"its scales are {source.scales.dtype} and x is {dtype}"
    if source.weight.size < _FEWEST_WORDS:
        return f"it has fewer than {_FEWEST_WORDS} words"
    if source.weight.size >= _MOST_WORDS:
        return f"it has {source.weight.size} words, and they are counted up to {_MOST_WORDS}"
    return None


def geometries(shape: MatrixShape, rows: int) -> Sequence[SmallMGeometry]:
    """Layouts for so many rows of x: the best guess first, and one that any device takes last."""
    wanted = [(*each, "float32") for each in _LAYOUTS[:4]]
    if shape.dtype == mx.float16:
        wanted += [(*each, "float16") for each in _HALF_LAYOUTS]
    wanted += [(*each, "float32") for each in _LAYOUTS[4:]]
    made = [SmallMGeometry(*each) for each in wanted]
    blocks = -(-shape.inputs // BLOCK)
    return [
        each
        for each in made
        if each.threadgroup_bytes(rows) <= MOST_THREADGROUP_BYTES and each.simdgroups <= max(2, blocks)
    ]
