"""Whether a way of holding weights computes what it should on this processor, before a model is held so."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_dspark.kernels.base import Source, Way
from mlx_dspark.kernels.framework.shapes import exact_product
from mlx_dspark.kernels.race import cut

TOLERANCE = 1e-5
"""Largest error, as a share of the largest output."""
_WIDTHS = (1, 2, 3, 4, 6, 8, 9)
_WEIGHTS = 1 << 17


def fault(way: Way, sources: Sequence[Source]) -> str:
    """What is wrong with the way's products of the first outputs of a matrix of every kind that it takes;
    empty where nothing is. A way that raises is wrong too.

    Compared with products of exact weights that are summed in float64, at every number of rows that the ways
    treat apart.
    """
    for source in {source.kind: source for source in sources}.values():
        if way.refusal(source) is None and (found := _fault_of(way, cut(source, _WEIGHTS))):
            return found
    return ""


def _fault_of(way: Way, source: Source) -> str:
    rows = np.random.default_rng(0).standard_normal((max(_WIDTHS), source.inputs)).astype(np.float32)
    exact = exact_product(mx.array(rows), source)
    allowed = TOLERANCE * float(np.max(np.abs(exact)))
    try:
        held = way.hold(source)
        for width in _WIDTHS:
            error = float(np.max(np.abs(held.multiply(rows[:width]) - exact[:width])))
            if not error <= allowed:
                return f"it computes {source.kind} wrong here: {width} rows are off by {error:.1e}"
    except (RuntimeError, ValueError, ArithmeticError) as error:  # llvmlite raises the first
        return f"it fails here: {type(error).__name__}: {error}"
    return ""
