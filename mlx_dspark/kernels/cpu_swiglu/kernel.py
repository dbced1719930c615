"""silu(gate) * up, element by element, in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mlx_dspark.kernels.llvm import F32, LANES, Emitter, floats


@cache
def swiglu() -> Callable[..., None]:
    """`(gate, up, count)`: gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i], count a multiple of LANES."""
    emit = Emitter("swiglu", ("gate", "up"), ("count",))
    builder, gates, ups = emit.builder, emit.arguments["gate"], emit.arguments["up"]
    with emit.loop(0, emit.arguments["count"], LANES) as index:
        gate = emit.load(gates, F32, index, LANES)
        shrink = builder.fadd(emit.exp(builder.fsub(floats(-0.0), gate)), floats(1.0))
        up = emit.load(ups, F32, index, LANES)
        emit.store(builder.fmul(builder.fdiv(gate, shrink), up), gates, F32, index)
    return emit.compile()
