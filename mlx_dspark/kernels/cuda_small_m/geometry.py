"""How a launch is laid out: what a warp, a block and a multiprocessor hold of the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlx_dspark.kernels.cuda_common.device import MULTIPROCESSORS
from mlx_dspark.kernels.framework.shapes import MatrixShape

CHUNK = 128
"""Inputs whose x a warp has in registers at once."""

SHARED = 227 * 1024
"""Bytes of shared memory that the blocks of a multiprocessor have together; each takes 1024 more."""


class Geometry(NamedTuple):
    """One way to lay the launch out.

    tiles     of 16 outputs that a block computes at once
    warps     of a block: they take shares of the inputs in turn, and add in their own order at the end
    stages    of shares that a warp has in shared memory: one in use, the others on their way
    span      chunks of 128 inputs in a share
    resident  blocks that a multiprocessor is to hold at once
    steady    a block takes one set of tiles after another; else each set has a block of its own
    hold      x and its sums stay in shared memory, for the block's whole life
    """

    tiles: int
    warps: int
    stages: int
    span: int
    resident: int
    steady: bool = True
    hold: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """What decides in which order a row is summed."""
        return self.warps, self.span

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, shape: MatrixShape, columns: int) -> int:
        """Of a block, where x has up to 8 * `columns` rows."""
        share = CHUNK * self.span
        codes = 16 * (share * shape.bits // 8 + 4 * shape.bits)
        parts = 32 * max(4, 2 * share // shape.group_size)
        sums = columns * 4 * 128
        inputs = -(-shape.inputs // share) * share
        held = columns * (16 * inputs + 32 * inputs // shape.group_size) if self.hold else 0
        return self.warps * self.tiles * (self.stages * (codes + parts) + sums) + held

    def blocks(self, *outputs: int) -> int:
        """For matrices of so many outputs each."""
        needed = sum(-(-each // (16 * self.tiles)) for each in outputs)
        return min(needed, MULTIPROCESSORS * self.resident) if self.steady else needed

    def fits(self, shape: MatrixShape, columns: int) -> bool:
        return self.resident * (self.shared_bytes(shape, columns) + 1024) <= SHARED


LAST = Geometry(1, 4, 2, 1, 1)
"""Takes little of everything: of matrices with few inputs, for devices that refuse the others."""

NARROW = (Geometry(1, 4, 3, 1, 4), Geometry(1, 4, 2, 1, 2), LAST)
BYTES = (
    Geometry(1, 8, 3, 2, 1, hold=True),
    Geometry(1, 8, 2, 2, 1, hold=True),
    Geometry(1, 8, 2, 2, 2),
    Geometry(1, 8, 2, 2, 1),
)
WIDE = (Geometry(1, 8, 4, 2, 1, hold=True), Geometry(1, 8, 3, 2, 1, hold=True))
"""For more than 8 rows of x, which each set of outputs would read anew from where it lies."""

HELD, ONE, TWO, SMALLEST = (
    Geometry(2, 8, 3, 2, 1, hold=True),
    Geometry(1, 8, 3, 2, 2),
    Geometry(2, 8, 2, 2, 2),
    Geometry(1, 8, 2, 2, 1),
)


def ways(shape: MatrixShape, rows: int) -> Sequence[Geometry]:
    """Best guess first, the smallest last; at most four. All add in one order for every number of rows."""
    columns = -(-rows // 8)
    if shape.inputs < 2048:
        offered = NARROW
    elif shape.bits == 8:
        offered = BYTES
    else:
        offered = (*_nibbles(shape, rows), SMALLEST)
    return [each for each in offered if each.fits(shape, columns)]


def _nibbles(shape: MatrixShape, rows: int) -> tuple[Geometry, ...]:
    """For 4 bits, by how many sets of outputs a block gets and how much of x it would hold."""
    if shape.outputs < shape.inputs:
        return ONE, TWO
    if rows > 8:
        return (TWO, WIDE[1], ONE) if shape.outputs == shape.inputs else (*WIDE, TWO)
    if shape.outputs == shape.inputs:
        return TWO, HELD, ONE
    if shape.outputs >= 16 * shape.inputs:
        return (TWO, HELD, ONE) if rows == 1 else (HELD, TWO, ONE)
    return (HELD, ONE, TWO) if rows == 1 else (ONE, TWO, HELD)
