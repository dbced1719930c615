"""How a launch is laid out: what a warp, a block and a multiprocessor hold of the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlx_dspark.kernels.cuda_small_m.cases import Shape

CHUNK = 128
"""Inputs that a warp takes at once."""

MULTIPROCESSORS = 132
"""Of a large device: so many times `resident` blocks share out the tiles."""

SHARED = 227 * 1024
"""Bytes of shared memory that the blocks of a multiprocessor have together; each takes 1024 more."""


class Geometry(NamedTuple):
    """One way to lay the launch out.

    tiles     of 16 outputs that a block computes at once
    warps     of a block: they take chunks of the inputs in turn, and add in their own order at the end
    stages    of weights that a warp has in shared memory: one in use, the others on their way
    resident  blocks that a multiprocessor is to hold at once
    steady    a block takes one set of tiles after another; else each set has a block of its own
    hold      x stays in shared memory, for the block's whole life
    """

    tiles: int
    warps: int
    stages: int
    resident: int
    steady: bool = True
    hold: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, bits: int, inputs: int, columns: int) -> int:
        """Of a block, where x has up to 8 * `columns` rows of so many inputs."""
        stage = 16 * self.tiles * 20 * bits
        sums = self.tiles * columns * 4 * 128
        held = columns * 16 * -(-inputs // CHUNK) * CHUNK if self.hold else 0
        return self.warps * (self.stages * stage + sums) + held

    def blocks(self, outputs: int) -> int:
        needed = -(-outputs // (16 * self.tiles))
        return min(needed, MULTIPROCESSORS * self.resident) if self.steady else needed

    def fits(self, bits: int, inputs: int, columns: int) -> bool:
        return self.resident * (self.shared_bytes(bits, inputs, columns) + 1024) <= SHARED


LAST = Geometry(1, 4, 2, 1)
"""Takes little of everything: for devices that refuse the others."""


def ways(shape: Shape, rows: int) -> Sequence[Geometry]:
    """Best guess first. All but the last add in one order for every number of rows."""
    columns = -(-rows // 8)
    chunks = -(-shape.inputs // CHUNK)
    if chunks <= 8:
        offered = [Geometry(1, 4, 3, 4), Geometry(1, 4, 2, 2)]
    elif shape.bits == 4:
        offered = [Geometry(2, 8, 3, 3 if columns == 1 else 2), Geometry(1, 8, 3, 3), Geometry(2, 8, 3, 1)]
    else:
        offered = [Geometry(1, 8, 3, 3 if columns == 1 else 2), Geometry(2, 8, 2, 2), Geometry(1, 8, 2, 1)]
    return [each for each in (*offered, LAST) if each.fits(shape.bits, shape.inputs, columns)]
