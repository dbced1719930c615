"""Which matrices the kernel takes."""

from __future__ import annotations

import mlx.core as mx

from mlx_dspark.kernels.base import Source

BITS = (4, 8)
GROUPS = (32, 64, 128)
HALVES = (mx.float16, mx.bfloat16)
MOST_ROWS = 16


def refusal(source: Source, dtype: mx.Dtype, *, experts: bool) -> str | None:
    """Why the kernel does not take this matrix, or these of several experts, with x of `dtype`; None where it
    does."""
    if (source.weight.ndim == 3) != experts:
        return "it is not one of several experts" if experts else "it is not a matrix"
    if source.mode != "affine" or source.bits not in BITS or source.group_size not in GROUPS:
        return "it is not affine with 4 or 8 bits in groups of 32, 64 or 128"
    if dtype not in HALVES:
        return f"x is {dtype}, not float16 or bfloat16"
    if source.scales is None or source.biases is None:
        return "it has no scales and biases"
    if source.scales.dtype != dtype or source.biases.dtype != dtype:
        return f"its scales are {source.scales.dtype} and x is {dtype}"
    return None
