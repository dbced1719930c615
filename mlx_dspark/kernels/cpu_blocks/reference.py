"""What the blocked product must equal: the matrix in float64, and how far float32 may stray from it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Floats, Source

Doubles = NDArray[np.float64]


def exact_weight(source: Source) -> Doubles:
    """[outputs, inputs] in float64: scale * code + bias, or the stored value."""
    if not source.bits:
        return np.array(source.weight.astype(mx.float32)).astype(np.float64)
    scales, codes, biases = _parts(source)
    return scales * codes + biases


def error_bound(source: Source, rows: Floats) -> Doubles:
    """[rows, outputs]: the rounding that float32 sums of these terms, added in any order, may gather."""
    if source.bits:
        scales, codes, biases = _parts(source)
        sizes = np.abs(scales) * codes + np.abs(biases)
    else:
        sizes = np.abs(exact_weight(source))
    return (source.inputs + 4) * 2.0**-24 * (np.abs(rows.astype(np.float64)) @ sizes.T)


def _parts(source: Source) -> tuple[Doubles, Doubles, Doubles]:
    """Scales, codes and biases, each [outputs, inputs]."""
    assert source.scales is not None
    assert source.biases is not None
    per_word = 32 // source.bits
    words = np.array(source.weight)[..., None] >> (np.arange(per_word, dtype=np.uint32) * source.bits)
    codes = (words & (2**source.bits - 1)).reshape(source.outputs, source.inputs).astype(np.float64)
    scales, biases = (
        np.repeat(np.array(part.astype(mx.float32)).astype(np.float64), source.group_size, axis=1)
        for part in (source.scales, source.biases)
    )
    return scales, codes, biases
