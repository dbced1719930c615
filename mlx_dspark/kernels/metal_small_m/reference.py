"""What the kernel computes, in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.shapes import exact_product


class SmallM(NamedTuple):
    """`x` [rows, inputs]; `experts` [rows], rising, which matrix of several each row is for."""

    x: mx.array
    source: Source
    experts: mx.array | None = None


def product(inputs: SmallM) -> NDArray[np.float32]:
    """[rows, outputs]: x times the transposed matrix, whose weights are scale * code + bias in float32."""
    if inputs.experts is None:
        return exact_product(inputs.x, inputs.source)
    assigned = np.array(inputs.experts)
    out = np.zeros((len(assigned), inputs.source.outputs), np.float32)
    for expert in np.unique(assigned).tolist():
        mine = np.flatnonzero(assigned == expert)
        out[mine] = exact_product(inputs.x[mx.array(mine)], _one(inputs.source, expert))
    return out


def _one(source: Source, expert: int) -> Source:
    assert source.scales is not None
    assert source.biases is not None
    held = source.scales[expert], source.biases[expert]
    return replace(source, weight=source.weight[expert], scales=held[0], biases=held[1])
