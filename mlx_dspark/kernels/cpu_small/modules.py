"""RMS norm and rotary positions in numpy, for the few rows of a decoding step.

MLX's CPU back end makes either of a chain of operations, each with a fixed cost above that of its arithmetic.
"""

from __future__ import annotations

import math
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_dspark.kernels.base import Floats
from mlx_dspark.kernels.modules import as_array, as_rows


class HostRMSNorm(nn.Module):
    """`nn.RMSNorm` of a float32 model: [..., dims] -> [..., dims]."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight.astype(mx.float32)
        self.eps = norm.eps
        self._weight = np.array(self.weight)

    def __call__(self, x: mx.array) -> mx.array:
        rows = as_rows(x)
        mean = np.mean(np.square(rows), axis=-1, keepdims=True)
        return as_array(rows / np.sqrt(mean + np.float32(self.eps)) * self._weight, x)


class HostRoPE(nn.Module):
    """`nn.RoPE` that is not interleaved: [batch, heads, rows, head_dim], rows at positions from `offset` on.

    `offset` is one number, or an array of one number or of one a batch item.
    """

    def __init__(self, rope: nn.RoPE) -> None:
        super().__init__()
        self.dims, self.base, self.scale = rope.dims, rope.base, rope.scale

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        rows = as_rows(x).reshape(x.shape)
        cosines, sines = self._angles(offset, rows.shape[-2])
        half = self.dims // 2
        left, right = rows[..., :half], rows[..., half : self.dims]
        turned = np.empty(rows.shape, np.float32)
        turned[..., :half] = left * cosines - right * sines
        turned[..., half : self.dims] = left * sines + right * cosines
        turned[..., self.dims :] = rows[..., self.dims :]
        return mx.array(turned).astype(x.dtype)

    def _angles(self, offset: int | mx.array, rows: int) -> tuple[Floats, Floats]:
        """Cosines and sines [rows, dims / 2], or [batch, 1, rows, dims / 2] where the items differ."""
        starts = [offset] if isinstance(offset, int) else np.array(offset).reshape(-1).tolist()
        tables = [_angles(self.dims, self.base, self.scale, start, rows) for start in starts]
        if len(set(starts)) == 1:
            return tables[0]
        cosines, sines = (np.stack(part)[:, None] for part in zip(*tables, strict=True))
        return cosines, sines


@lru_cache(maxsize=16)
def _angles(dims: int, base: float, scale: float, start: int, rows: int) -> tuple[Floats, Floats]:
    """Cosines and sines [rows, dims / 2], rounded where MLX's own rotation rounds."""
    half = dims // 2
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half))
    positions = mx.arange(start, start + rows, dtype=mx.float32) * scale
    angles = positions[:, None] * frequencies
    return np.array(mx.cos(angles)), np.array(mx.sin(angles))


def host_module(module: nn.Module) -> nn.Module | None:
    """The numpy form of `module`; None where there is none."""
    if type(module) is nn.RMSNorm:
        return HostRMSNorm(module)
    if type(module) is nn.RoPE and not module.traditional:
        return HostRoPE(module)
    return None
