"""Attention over MLX arrays by the kernel of this folder."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_dspark.kernels.base import Floats
from mlx_dspark.kernels.cpu_attention.kernel import attend_heads
from mlx_dspark.kernels.llvm import LANES
from mlx_dspark.kernels.threads import share

_MACS_PER_SPAN = 4_000_000


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    causal: bool,
    threads: int | None = None,
) -> mx.array:
    """Softmax attention in float32: [batch, heads, rows, head_dim], the shape of `queries`.

    keys, values: [batch, kv_heads, depth, head_dim]. With `causal` the last row sees every key and each row
    before it one key fewer. `takes` says which arrays it is for.
    """
    mx.eval(queries, keys, values)
    query, key, value = (np.array(array, copy=False) for array in (queries, keys, values))
    query = np.ascontiguousarray(query * np.float32(scale))
    key, value = _last_axis_together(key), _last_axis_together(value)
    batch, heads, rows, head_dim = query.shape
    depth, shared_by = key.shape[2], heads // key.shape[1]
    seen, grow = (depth - rows + 1, 1) if causal else (depth, 0)
    out = np.empty_like(query)
    function = attend_heads(head_dim)

    def job(first: int, last: int) -> None:
        scores = np.empty(depth + LANES, np.float32)
        sizes = (first, last, shared_by, rows, seen, grow, *_strides(key), *_strides(value))
        for row in range(batch):
            arrays = (query[row], key[row], value[row], scores, out[row])
            function(*(array.ctypes.data for array in arrays), *sizes)

    share(heads, 2 * query.size * depth // _MACS_PER_SPAN, job, threads)
    return mx.array(out)


def _strides(array: Floats) -> tuple[int, int]:
    """Floats from head to head and from position to position."""
    return array.strides[1] // array.itemsize, array.strides[2] // array.itemsize


def takes(queries: mx.array, keys: mx.array, values: mx.array, mask: object, sinks: object = None) -> bool:
    """Whether `attend` is for these arguments of MLX's attention: float32, no mask but "causal", no sinks."""
    head_dim = queries.shape[-1]
    plain_mask = mask is None or (isinstance(mask, str) and mask == "causal")
    return (
        sinks is None
        and plain_mask
        and queries.dtype == keys.dtype == values.dtype == mx.float32
        and keys.shape[-1] == values.shape[-1] == head_dim
        and head_dim % LANES == 0
        and queries.shape[2] <= keys.shape[2]
    )


def _last_axis_together(array: Floats) -> Floats:
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)
