"""Laws of the Metal attention kernel, run on a CPU: it is attention in float32, and reads keys once."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import pytest

from mlx_dspark.kernels.metal_attention.kernel import Geometry
from tests.metal_shim.attention import Call
from tests.metal_shim.running import SCHEDULES

WIDE, FOUR, PAIR = Geometry(8, 1, True, 96), Geometry(4, 2, True, 96), Geometry(2, 1, True, 96)
NARROW = Geometry(4, 1, True, 96)
LOOSE = [Geometry(simd, 1, False, 96) for simd in (2, 4, 8)]
BF = mx.bfloat16

CALLS = [
    # head sizes, as laid out first
    Call(4, 2, 64, 5, 37),
    Call(2, 2, 80, 3, 64, BF),
    Call(6, 2, 96, 2, 65),
    Call(9, 3, 128, 5, 63, BF),
    Call(8, 2, 192, 4, 40),
    Call(6, 1, 256, 8, 70, BF),
    # layouts: splits and a tail, few keys, several parts
    Call(8, 2, 64, 8, 300, geometry=NARROW, rows=2, sinks=True),
    Call(3, 1, 96, 7, 300, BF, geometry=PAIR, sinks=True),
    Call(4, 2, 128, 9, 530, geometry=WIDE, mask="none"),
    Call(16, 1, 64, 16, 21, geometry=WIDE),
    Call(16, 1, 128, 16, 16, BF, geometry=FOUR),
    Call(4, 1, 256, 3, 150, geometry=LOOSE[0]),
    Call(2, 1, 80, 16, 33, geometry=LOOSE[0]),
    Call(4, 2, 128, 5, 33, BF, geometry=LOOSE[1]),
    Call(5, 1, 192, 6, 90, geometry=LOOSE[2]),
    # masks and windows
    Call(4, 2, 64, 4, 200, rows=2, mask="random", sinks=True),
    Call(4, 2, 96, 3, 200, BF, rows=3, mask="random"),
    Call(4, 4, 64, 5, 400, geometry=PAIR, rows=2, mask="ragged"),
    Call(4, 2, 128, 6, 500, window=33, sinks=True),
    Call(8, 1, 64, 8, 700, BF, geometry=PAIR, window=200),
    Call(1, 1, 64, 1, 9, mask="none"),
    # memory
    Call(4, 2, 64, 5, 70, lay="apart", mask="random", rows=2),
    Call(4, 2, 96, 5, 70, BF, lay="odd", geometry=LOOSE[1]),
    Call(1, 1, 128, 2, 3, mask="random"),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_kernel_is_attention_in_float32(call: Call) -> None:
    for seed, schedule in enumerate(SCHEDULES):
        error, _ = call.run(schedule, seed=seed)
        assert error <= 1, schedule
