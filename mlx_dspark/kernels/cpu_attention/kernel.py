"""Softmax attention, one query row at a time, in float32.

A row's result depends on its own query and on the keys it sees, never on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from llvmlite import ir

from mlx_dspark.kernels.llvm import F32, FLOATS, I64, LANES, Emitter, Value, floats

VERSION = 1


@cache
def attend_heads(head_dim: int) -> Callable[..., None]:
    """Attention of some query heads over the key heads they share, compiled for one head_dim.

    head_dim  a multiple of LANES
    queries   float32 [heads, rows, head_dim], already scaled, without gaps; `out` alike, written
    keys      float32 [kv_heads, depth, head_dim]: `key_head_stride` floats from head to head, `key_stride`
              from key to key; values alike
    scores    float32 scratch, room for the depth rounded up to a multiple of LANES
    first, last, shared_by   heads `first <= head < last`; head h reads key head h // shared_by
    rows, seen, grow         row 0 sees the first `seen` keys, every later row `grow` more than the one before
    """
    emit = Emitter(
        f"attend_{head_dim}",
        ("queries", "keys", "values", "scores", "out"),
        (
            *("first", "last", "shared_by", "rows", "seen", "grow"),
            *("key_head_stride", "key_stride", "value_head_stride", "value_stride"),
        ),
    )
    _Heads(emit, head_dim).write()
    return emit.compile()


class _Heads:
    """Writes `attend_heads`."""

    def __init__(self, emit: Emitter, head_dim: int) -> None:
        assert head_dim % LANES == 0
        self.emit = emit
        self.head_dim = head_dim
        self.parts = range(0, head_dim, LANES)

    def write(self) -> None:
        emit, names = self.emit, self.emit.arguments
        with emit.loop(names["first"], names["last"]) as head, emit.loop(0, names["rows"]) as row:
            kv_head = emit.builder.sdiv(head, names["shared_by"])
            keys_at = emit.product_of(kv_head, names["key_head_stride"])
            values_at = emit.product_of(kv_head, names["value_head_stride"])
            row_at = emit.product_of(emit.sum_of(emit.product_of(head, names["rows"]), row), self.head_dim)
            seen = emit.sum_of(names["seen"], emit.product_of(row, names["grow"]))
            self._score(row_at, keys_at, seen)
            total = self._exponentiate(seen)
            self._mix(row_at, values_at, seen, total)

    def _score(self, row_at: Value, keys_at: Value, seen: Value) -> None:
        """scores[key] = query . key, and minus infinity up to the next multiple of LANES."""
        emit, names = self.emit, self.emit.arguments
        query = [emit.load(names["queries"], F32, emit.sum_of(row_at, part), LANES) for part in self.parts]
        with emit.loop(0, seen) as key:
            key_at = emit.sum_of(keys_at, emit.product_of(key, names["key_stride"]))
            product = floats(0.0)
            for part, vector in zip(self.parts, query, strict=True):
                place = emit.sum_of(key_at, part)
                product = emit.multiply_add(vector, emit.load(names["keys"], F32, place, LANES), product)
            emit.store(emit.add_lanes(product), names["scores"], F32, key)
        with emit.loop(seen, self._padded(seen)) as key:
            emit.store(ir.Constant(F32, float("-inf")), names["scores"], F32, key)

    def _padded(self, seen: Value) -> Value:
        mask = ir.Constant(I64, -LANES)
        return self.emit.builder.and_(self.emit.sum_of(seen, LANES - 1), mask)

    def _exponentiate(self, seen: Value) -> Value:
        """scores = exp(scores - largest); returns their sum."""
        emit, scores, builder = self.emit, self.emit.arguments["scores"], self.emit.builder
        largest = emit.local(FLOATS, floats(float("-inf")))
        with emit.loop(0, self._padded(seen), LANES) as key:
            vector = emit.load(scores, F32, key, LANES)
            greater = builder.fcmp_ordered(">", vector, builder.load(largest))
            builder.store(builder.select(greater, vector, builder.load(largest)), largest)
        top = emit.broadcast(emit.largest_lane(builder.load(largest)))
        total = emit.local(FLOATS, floats(0.0))
        with emit.loop(0, self._padded(seen), LANES) as key:
            vector = emit.exp(builder.fsub(emit.load(scores, F32, key, LANES), top))
            emit.store(vector, scores, F32, key)
            builder.store(builder.fadd(builder.load(total), vector), total)
        return emit.add_lanes(builder.load(total))

    def _mix(self, row_at: Value, values_at: Value, seen: Value, total: Value) -> None:
        """out = sum of scores[key] * value[key], over `total`."""
        emit, names, builder = self.emit, self.emit.arguments, self.emit.builder
        mixed = [emit.local(FLOATS, floats(0.0)) for _ in self.parts]
        with emit.loop(0, seen) as key:
            weight = emit.broadcast(emit.load(names["scores"], F32, key))
            value_at = emit.sum_of(values_at, emit.product_of(key, names["value_stride"]))
            for part, slot in zip(self.parts, mixed, strict=True):
                value = emit.load(names["values"], F32, emit.sum_of(value_at, part), LANES)
                builder.store(emit.multiply_add(weight, value, builder.load(slot)), slot)
        whole = emit.broadcast(total)
        for part, slot in zip(self.parts, mixed, strict=True):
            emit.store(builder.fdiv(builder.load(slot), whole), names["out"], F32, emit.sum_of(row_at, part))
