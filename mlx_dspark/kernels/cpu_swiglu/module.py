"""A feed-forward module in one step outside MLX, and the check that admits it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_dspark.kernels.cpu_swiglu.kernel import swiglu
from mlx_dspark.kernels.llvm import LANES
from mlx_dspark.kernels.modules import HeldLinear, as_array, as_rows

_CHILDREN = {"gate_proj", "up_proj", "down_proj"}
_TOLERANCE = 1e-5
# Typical gate sizes at which a module is compared: small, and large enough to meet a clip.
_GATE_SIZES = (0.5, 3.0, 30.0)


class HeldSwiglu(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)) over held matrices: [..., inputs] -> [..., outputs]."""

    def __init__(self, gate_proj: HeldLinear, up_proj: HeldLinear, down_proj: HeldLinear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def __call__(self, x: mx.array) -> mx.array:
        rows = as_rows(x)
        gate = np.ascontiguousarray(self.gate_proj.multiply(rows))
        up = np.ascontiguousarray(self.up_proj.multiply(rows))
        swiglu()(gate.ctypes.data, up.ctypes.data, gate.size)
        return as_array(self.down_proj.multiply(gate), x)


def fused(module: nn.Module) -> HeldSwiglu | None:
    """`module` as one step; None unless it is three held projections and computes the same on trials."""
    children = module.children()
    projections = {name: child for name, child in children.items() if isinstance(child, HeldLinear)}
    if set(children) != _CHILDREN or set(projections) != _CHILDREN:
        return None
    if projections["gate_proj"].matrix.outputs % LANES:
        return None
    candidate = HeldSwiglu(**projections)
    inputs = candidate.gate_proj.matrix.inputs
    trial = np.random.default_rng(0).standard_normal((2, inputs)).astype(np.float32)
    trial /= max(float(np.std(candidate.gate_proj.multiply(trial))), 1e-30)
    for size in _GATE_SIZES:
        x = mx.array(trial * np.float32(size))[None]
        expected, got = module(x), candidate(x)
        close = mx.max(mx.abs(expected - got)) <= _TOLERANCE * mx.max(mx.abs(expected))
        if not close.item():
            return None
    return candidate
