"""Convolutions along a block, whose coefficients each slot computes for itself."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.catalog.formats.base import Convolution

INPUT, OUTPUT = 0, 1
"""The sides of a sublayer that is convolved."""


class DynamicConv(nn.Module):
    """The pair of convolutions around a sublayer, before it and after it.

    The coefficient of a slot, a tap and a channel is the sum of a learned one and of one that the slot's own
    input gives, which `group` neighbouring channels share. Tap `o` looks `o` slots back; nothing lies before
    slot 0. The context is not convolved.
    """

    def __init__(self, shape: Convolution, hidden: int) -> None:
        super().__init__()
        self.base_kernel = mx.zeros((2, shape.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * shape.taps * (hidden // shape.group), bias=False)
        self.group = shape.group

    def coefficients(self, x: mx.array) -> mx.array:
        """Of both sides: `[rows, slots, 2, taps, hidden]` from what enters the sublayer, `x`
        `[rows, slots, hidden]`."""
        sides, taps, _ = self.base_kernel.shape
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], sides, taps, -1)
        return self.base_kernel + mx.repeat(dynamic, self.group, axis=-1)


def convolved(coefficients: mx.array, side: int, y: mx.array) -> mx.array:
    """`y` `[rows, slots, hidden]` under one side of `DynamicConv.coefficients`."""
    kernel = coefficients[:, :, side]
    out = kernel[:, :, 0] * y
    for back in range(1, min(kernel.shape[2], y.shape[1])):
        shifted = mx.pad(y[:, :-back], [(0, 0), (back, 0), (0, 0)])
        out = out + kernel[:, :, back] * shifted
    return out
