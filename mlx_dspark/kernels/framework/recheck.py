"""What was admitted in another process is looked at once in this one, before a model runs on it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.kernel import MatrixKernel
from mlx_dspark.kernels.framework.plan import Admitted
from mlx_dspark.kernels.framework.rows import Rows, stock_rows

ALLOWED = 4
"""Times the tolerance of the trial: MLX's own product, which this is held against, rounds as well."""


def wrong_here(admitted: Admitted[MatrixKernel], source: Source, dtype: mx.Dtype) -> str:
    """Why the kernel is not used for this matrix after all: on rows of random numbers, as many as the widest
    launch takes, it gives something else than MLX. Empty where it does not. Raises what the kernel raises."""
    width = max(admitted.placed)
    x = mx.random.normal((width, source.inputs), dtype=mx.float32, key=mx.random.key(width)).astype(dtype)
    kernel: Any = admitted.kernel
    got, wanted = kernel.multiply(x, source, admitted.placed[width]), stock_rows(Rows(x, source))
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    off = (mx.abs(got - wanted).max() / mx.abs(wanted).max()).item()
    if off <= ALLOWED * kernel.tolerance(kernel.case(source, dtype, width)):
        return ""
    return f"off by {off:.1e} of the largest output here, which it was not at its trial"
