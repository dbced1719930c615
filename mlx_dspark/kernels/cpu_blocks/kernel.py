"""The blocked product: weights stay packed, and each is expanded once for all rows of a tile.

A matrix [outputs, inputs] is cut into blocks of BLOCK outputs. In a block the weights of one input lie
together, so that vector lanes run over outputs and each row owns its accumulators: a row's result depends
neither on how many rows are multiplied with it, nor on how the blocks are shared between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from llvmlite import ir

from mlx_dspark.kernels.llvm import (
    F16,
    F32,
    FLOATS,
    I8,
    I16,
    I64,
    INTS,
    LANES,
    Emitter,
    Value,
    floats,
)

VERSION = 2
BLOCK = 2 * LANES
CHUNK = 32
ROW_TILES = (1, 2, 3, 4, 6, 8) if LANES == 16 else (1, 2, 3, 4)
WEIGHT_BITS = {"u4": 4, "u8": 8, "bf16": 16, "f16": 16, "f32": 32}
_UNROLL = 8

_Cell = tuple[int, int]  # row and half of the block


@cache
def multiply(kind: str, rows: int) -> Callable[..., None]:
    """The product for weights of `kind` (a key of WEIGHT_BITS) and tiles of `rows` rows, compiled.

    Arguments of the function, with blocks of the outputs `first <= block < last`:
    inputs    float32 [tiles, inputs, rows]
    sums      float32 [tiles, chunks, rows], the inputs summed over each CHUNK; unused by dense kinds
    codes     [blocks, inputs, BLOCK] weights of `kind`; u4 holds lane j low and lane j + LANES high in byte j
    scales    float32 [blocks, groups, BLOCK], and biases alike; unused by dense kinds
    out       float32 [tiles, rows, stride], written
    tiles, chunks, chunks_per_group, stride, first, last: 64-bit integers
    """
    emit = Emitter(
        f"multiply_{kind}_{rows}",
        ("inputs", "sums", "codes", "scales", "biases", "out"),
        ("tiles", "chunks", "chunks_per_group", "stride", "first", "last"),
    )
    _Product(emit, kind, rows).write()
    return emit.compile()


@cache
def sum_chunks() -> Callable[..., None]:
    """`(inputs, sums, count)`: sums[i] = the sum of inputs[CHUNK * i : CHUNK * (i + 1)], float32."""
    emit = Emitter("sum_chunks", ("inputs", "sums"), ("count",))
    with emit.loop(0, emit.arguments["count"]) as index:
        start = emit.product_of(index, CHUNK)
        total = emit.load(emit.arguments["inputs"], F32, start, LANES)
        for offset in range(LANES, CHUNK, LANES):
            part = emit.load(emit.arguments["inputs"], F32, emit.sum_of(start, offset), LANES)
            total = emit.builder.fadd(total, part)
        emit.store(emit.add_lanes(total), emit.arguments["sums"], F32, index)
    return emit.compile()


class _Product:
    """Writes one `multiply`."""

    def __init__(self, emit: Emitter, kind: str, rows: int) -> None:
        self.emit = emit
        self.kind = kind
        self.rows = rows
        self.grouped = kind in ("u4", "u8")
        self.cells = [(row, half) for row in range(rows) for half in range(2)]

    def write(self) -> None:
        emit, names = self.emit, self.emit.arguments
        with emit.loop(names["first"], names["last"]) as block, emit.loop(0, names["tiles"]) as tile:
            totals = {cell: emit.local(FLOATS, floats(0.0)) for cell in self.cells}
            with emit.loop(0, names["chunks"]) as chunk:
                self._add_chunk(totals, block, tile, chunk)
            for (row, half), total in totals.items():
                line = emit.product_of(emit.sum_of(emit.product_of(tile, self.rows), row), names["stride"])
                column = emit.sum_of(emit.product_of(block, BLOCK), half * LANES)
                emit.store(emit.builder.load(total), names["out"], F32, emit.sum_of(line, column))

    def _add_chunk(self, totals: dict[_Cell, Value], block: Value, tile: Value, chunk: Value) -> None:
        emit, names, builder = self.emit, self.emit.arguments, self.emit.builder
        weights_at = emit.sum_of(emit.product_of(block, names["chunks"]), chunk)
        inputs_at = emit.sum_of(emit.product_of(tile, names["chunks"]), chunk)
        partial = self._inner_products(weights_at, inputs_at)
        scales = biases = []
        if self.grouped:
            groups = builder.sdiv(names["chunks"], names["chunks_per_group"])
            group = builder.sdiv(chunk, names["chunks_per_group"])
            group_at = emit.product_of(emit.sum_of(emit.product_of(block, groups), group), BLOCK)
            halves = [emit.sum_of(group_at, half * LANES) for half in range(2)]
            scales = [emit.load(names["scales"], F32, place, LANES) for place in halves]
            biases = [emit.load(names["biases"], F32, place, LANES) for place in halves]
        for row, half in self.cells:
            slot = totals[row, half]
            total = builder.load(slot)
            part = builder.load(partial[row, half])
            if self.grouped:
                place = emit.sum_of(emit.product_of(inputs_at, self.rows), row)
                summed = emit.broadcast(emit.load(names["sums"], F32, place))
                total = emit.multiply_add(scales[half], part, total)
                total = emit.multiply_add(biases[half], summed, total)
            else:
                total = builder.fadd(total, part)
            builder.store(total, slot)

    def _inner_products(self, weights_at: Value, inputs_at: Value) -> dict[_Cell, Value]:
        """Per row and half: the sum of weight times input over the chunk, weights without scale and bias."""
        emit, names, builder = self.emit, self.emit.arguments, self.emit.builder
        partial = {cell: emit.local(FLOATS, floats(0.0)) for cell in self.cells}
        first_weight = emit.product_of(weights_at, CHUNK * BLOCK)
        first_input = emit.product_of(inputs_at, CHUNK * self.rows)
        with emit.loop(0, CHUNK, _UNROLL) as turn:
            for step in range(_UNROLL):
                k = emit.sum_of(turn, step)
                halves = self._weights(emit.sum_of(first_weight, emit.product_of(k, BLOCK)))
                row_at = emit.sum_of(first_input, emit.product_of(k, self.rows))
                for row in range(self.rows):
                    value = emit.broadcast(emit.load(names["inputs"], F32, emit.sum_of(row_at, row)))
                    for half in range(2):
                        slot = partial[row, half]
                        builder.store(emit.multiply_add(halves[half], value, builder.load(slot)), slot)
        return partial

    def _weights(self, index: Value) -> list[Value]:
        """The BLOCK weights from weight `index` on, as two vectors of floats."""
        emit, builder, codes = self.emit, self.emit.builder, self.emit.arguments["codes"]
        if self.kind == "u4":
            both = emit.load(codes, I8, builder.sdiv(index, ir.Constant(I64, 2)), LANES)
            low = builder.and_(both, ir.Constant(both.type, [15] * LANES))
            high = builder.lshr(both, ir.Constant(both.type, [4] * LANES))
            return [self._expand(half) for half in (low, high)]
        element = {"u8": I8, "bf16": I16, "f16": F16, "f32": F32}[self.kind]
        places = [emit.sum_of(index, half * LANES) for half in range(2)]
        return [self._expand(emit.load(codes, element, place, LANES)) for place in places]

    def _expand(self, stored: Value) -> Value:
        builder = self.emit.builder
        if self.kind == "f32":
            return stored
        if self.kind == "f16":
            return builder.fpext(stored, FLOATS)
        wide = builder.zext(stored, INTS)
        if self.kind == "bf16":
            return builder.bitcast(builder.shl(wide, ir.Constant(INTS, [16] * LANES)), FLOATS)
        return builder.sitofp(wide, FLOATS)
