"""What the kernel computes, in float32."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.shapes import exact_product


class SmallM(NamedTuple):
    """`x` [rows, inputs]."""

    x: mx.array
    source: Source


def product(inputs: SmallM) -> NDArray[np.float32]:
    """[rows, outputs]: x times the transposed matrix, whose weights are scale * code + bias in float32."""
    return exact_product(inputs.x, inputs.source)
