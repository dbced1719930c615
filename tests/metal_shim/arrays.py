"""MLX arrays as bytes and back."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_NUMPY: dict[mx.Dtype, Any] = {
    mx.bool_: np.bool_,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.float16: np.float16,
    mx.float32: np.float32,
    mx.bfloat16: np.uint16,
}


def contiguous_bytes(array: mx.array) -> Bytes:
    """The elements in row order."""
    return np.array(_plain(array)).reshape(-1).view(np.uint8)


def strided_bytes(array: mx.array) -> tuple[Bytes, list[int]]:
    """The bytes from the first element to the last as they lie in memory, and the strides in elements."""
    mx.eval(array)
    view = np.asarray(memoryview(_plain(array)))
    size = array.dtype.size
    strides = [stride // size for stride in view.strides]
    if any(stride < 0 for stride in strides):
        raise ValueError(f"the shim takes no negative strides: {strides}")
    extent = sum((n - 1) * stride for n, stride in zip(view.shape, strides, strict=True)) + 1
    held = (ctypes.c_uint8 * (extent * size)).from_address(view.ctypes.data)
    return np.ctypeslib.as_array(held).copy(), strides


def row_strides(shape: tuple[int, ...]) -> list[int]:
    """Strides in elements of a row-contiguous array."""
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def array_of(data: Bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """The array of this shape whose elements in row order are `data`."""
    made = mx.array(data.view(_NUMPY[dtype]).reshape(shape))
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


def _plain(array: mx.array) -> Any:
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
