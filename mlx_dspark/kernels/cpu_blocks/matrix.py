"""A matrix in the blocked layout."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Floats, Source
from mlx_dspark.kernels.cpu_blocks.kernel import (
    BLOCK,
    CHUNK,
    ROW_TILES,
    VERSION,
    WEIGHT_BITS,
    multiply,
    sum_chunks,
)
from mlx_dspark.kernels.llvm import LANES
from mlx_dspark.kernels.threads import share

_DENSE_KINDS = {mx.bfloat16: "bf16", mx.float16: "f16", mx.float32: "f32"}
_MACS_PER_SPAN = 4_000_000
_BLOCKS_AT_ONCE = 16
_NO_SCALES = np.zeros(1, np.float32)


class BlockedMatrix:
    """See `kernel.multiply` for the layout. A row's product has the same bits whatever rows surround it."""

    def __init__(self, source: Source) -> None:
        self.outputs, self.inputs = source.outputs, source.inputs
        self.blocks = -(-self.outputs // BLOCK)
        self.chunks = self.inputs // CHUNK
        if source.bits:
            scales, biases = source.float32_scales()
            assert biases is not None
            self.kind = f"u{source.bits}"
            self.chunks_per_group = source.group_size // CHUNK
            self._codes = _pack_codes(source, self.blocks)
            self._scales = _in_blocks(np.array(scales, copy=False), self.blocks)
            self._biases = _in_blocks(np.array(biases, copy=False), self.blocks)
        else:
            self.kind = _DENSE_KINDS[source.weight.dtype]
            self.chunks_per_group = 1
            self._codes = _in_blocks(_stored_bits(source.weight), self.blocks)
            self._scales = self._biases = _NO_SCALES

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + self._biases.nbytes

    @cached_property
    def _addresses(self) -> tuple[int, int, int]:
        return self._codes.ctypes.data, self._scales.ctypes.data, self._biases.ctypes.data

    def multiply(self, rows: Floats, threads: int | None = None) -> Floats:
        """[rows, inputs] -> [rows, outputs]. The result does not depend on `threads`."""
        rows = np.ascontiguousarray(rows, np.float32)
        count = len(rows)
        sums = np.empty((count, self.chunks), np.float32)
        sum_chunks()(rows.ctypes.data, sums.ctypes.data, sums.size)
        widest = ROW_TILES[-1]
        full = count - count % widest
        out = np.empty((count + widest, self.blocks * BLOCK), np.float32)
        if full:
            self._multiply(rows[:full], sums[:full], out, widest, threads)
        if full < count:
            tile = next(tile for tile in ROW_TILES if tile >= count - full)
            self._multiply(rows[full:], sums[full:], out[full:], tile, threads)
        return out[:count, : self.outputs]

    def _multiply(self, rows: Floats, sums: Floats, out: Floats, tile: int, threads: int | None) -> None:
        inputs, sums = _in_tiles(rows, tile), _in_tiles(sums, tile)
        function = multiply(self.kind, tile)
        arrays = (inputs.ctypes.data, sums.ctypes.data, *self._addresses, out.ctypes.data)
        sizes = (len(inputs), self.chunks, self.chunks_per_group, out.shape[1])
        macs = self.outputs * inputs.size
        share(
            self.blocks,
            macs // _MACS_PER_SPAN,
            lambda first, last: function(*arrays, *sizes, first, last),
            threads,
        )

    def lookup(self, indices: NDArray[np.int64]) -> Floats:
        """[n] -> [n, inputs]: only these rows are expanded."""
        block, lane = np.divmod(indices, BLOCK)
        if self.kind not in ("u4", "u8"):
            return _from_bits(self._codes[block, :, lane], self.kind)
        codes = self._codes[block, :, lane % self._codes.shape[-1]]
        if self.kind == "u4":
            codes = np.where(lane[:, None] < LANES, codes & 15, codes >> 4)
        per_group = self.chunks_per_group * CHUNK
        scales = np.repeat(self._scales[block, :, lane], per_group, axis=1)
        biases = np.repeat(self._biases[block, :, lane], per_group, axis=1)
        return codes * scales + biases


class Blocks:
    """Weights in blocks of output lanes, 4-bit and 8-bit as stored, dense ones exactly as stored."""

    name = "blocks"
    version = VERSION

    def refusal(self, source: Source) -> str | None:
        if source.bits:
            if source.mode != "affine" or source.bits not in (4, 8):
                return f"{source.bits}-bit {source.mode} weights are not affine of 4 or 8 bits"
            if source.group_size % CHUNK:
                return f"group size {source.group_size} is not a multiple of {CHUNK}"
        elif source.weight.dtype not in _DENSE_KINDS:
            return f"weights of type {source.weight.dtype}"
        elif source.inputs % CHUNK:
            return f"{source.inputs} inputs are not a multiple of {CHUNK}"
        return None

    def hold(self, source: Source) -> BlockedMatrix:
        return BlockedMatrix(source)


def _in_tiles(rows: Floats, tile: int) -> Floats:
    """[n, width] -> [tiles, width, tile], the last tile filled up with zeros."""
    if tile == 1:
        return rows.reshape(*rows.shape, 1)
    missing = -len(rows) % tile
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.float32)])
    return np.ascontiguousarray(rows.reshape(-1, tile, rows.shape[1]).transpose(0, 2, 1))


def _in_blocks(matrix: NDArray, blocks: int) -> NDArray:
    """[outputs, width] -> [blocks, width, BLOCK], the last block filled up with zeros."""
    whole = len(matrix) // BLOCK
    width = matrix.shape[1]
    made = np.zeros((blocks, width, BLOCK), matrix.dtype)
    made[:whole] = matrix[: whole * BLOCK].reshape(whole, BLOCK, width).transpose(0, 2, 1)
    if whole < blocks:
        made[whole, :, : len(matrix) - whole * BLOCK] = matrix[whole * BLOCK :].T
    return made


def _pack_codes(source: Source, blocks: int) -> NDArray[np.uint8]:
    """[blocks, inputs, BLOCK * bits / 8]; 4-bit lanes j and j + LANES share byte j."""
    packed = np.array(source.weight, copy=False).view(np.uint8)
    if source.bits == 8:
        return _in_blocks(packed, blocks)
    codes = np.empty((blocks, source.inputs, LANES), np.uint8)
    for first in range(0, blocks, _BLOCKS_AT_ONCE):
        last = min(first + _BLOCKS_AT_ONCE, blocks)
        pairs = _in_blocks(packed[first * BLOCK : last * BLOCK], last - first)
        low, high = pairs & 15, pairs >> 4
        codes[first:last, 0::2] = low[..., :LANES] | (low[..., LANES:] << 4)
        codes[first:last, 1::2] = high[..., :LANES] | (high[..., LANES:] << 4)
    return codes


def _stored_bits(weight: mx.array) -> NDArray:
    """The dense weights as numpy can carry them: bfloat16 as uint16."""
    if weight.dtype == mx.bfloat16:
        return np.array(weight.view(mx.uint16), copy=False)
    return np.array(weight, copy=False)


def _from_bits(stored: NDArray, kind: str) -> Floats:
    if kind == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


assert set(_DENSE_KINDS.values()) < set(WEIGHT_BITS)
