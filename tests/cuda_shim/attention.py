"""Compiles the attention kernel for the CPU and calls it as `attend` would."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import mlx_dspark.kernels.cuda_attention as home
from mlx_dspark.kernels.cuda_attention.attend import plan
from tests.cuda_shim.compiling import HERE, NAMES, changed, compiled_text

SOURCES = Path(home.__file__).parent


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for. `mask`: 0 none, 1 causal, 2 booleans."""

    dtype: mx.Dtype
    dim: int
    warps: int
    mask: int
    sinks: bool
    split: bool


def compiled(variant: Variant, folder: Path, change: tuple[str, str] | None = None) -> ctypes.CDLL:
    """The kernel as a library. `change` replaces a piece of its source, which must be there once."""
    source = {name: (SOURCES / name).read_text() for name in ("attend.cuh", "attend.cu", "combine.cu")}
    source = changed(source, change)
    text = Template((HERE / "attention.cpp.in").read_text()).substitute(
        header=source["attend.cuh"],
        body=source["attend.cu"],
        combine=source["combine.cu"],
        dtype=NAMES[variant.dtype],
        dim=variant.dim,
        warps=variant.warps,
        mask=variant.mask,
        sinks=int(variant.sinks),
        split=int(variant.split),
    )
    found = compiled_text(text, folder)
    found.attend.restype = ctypes.c_char_p
    return found


def attend(
    library: ctypes.CDLL,
    queries: mx.array,
    keys: tuple[mx.array, int],
    values: tuple[mx.array, int],
    scale: float,
    mask: NDArray[np.bool_] | None = None,
    sinks: mx.array | None = None,
) -> NDArray[np.float32]:
    """As the device would run it: `queries` are laid out `[rows, width, heads, dim]`, keys and values are the
    first so many positions of a buffer. `mask` broadcasts to `[rows, heads, width, length]`."""
    rows, width, heads, dim = queries.shape
    length, kv_heads = keys[1], keys[0].shape[1]
    warps, parts, splits = plan((rows, heads, width, dim), (rows, kv_heads, length, dim))
    del warps
    q, k, v = (_bits(each) for each in (queries, keys[0], values[0]))
    q = q.swapaxes(1, 2)
    full = None if mask is None else np.broadcast_to(mask, (rows, heads, width, length))
    given = None if sinks is None else _bits(sinks)
    partial = np.full((rows, width, heads, splits, dim), np.nan, np.float32)
    weights = np.full((rows, width, heads, splits, 2), np.nan, np.float32)
    out = np.zeros((rows, width, heads, dim), np.uint16)
    factor = np.array([scale], np.float32)
    sizes = np.array([rows, heads, width, kv_heads, length, splits, parts], np.int32)
    masked = _strided(full) if full is not None else (None, None)
    arrays = (*_strided(q), *_strided(k), *_strided(v), _at(factor), *masked, _at(given))
    said = library.attend(*arrays, _at(sizes), _at(partial), _at(weights), _at(out))
    assert said is None, said
    return np.array(mx.array(out).view(queries.dtype).astype(mx.float32)).swapaxes(1, 2)


def _bits(array: mx.array) -> NDArray[np.uint16]:
    return np.array(array.view(mx.uint16))


def _at(array: NDArray[Any] | None) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def _strided(array: NDArray[Any]) -> tuple[ctypes.c_void_p, Any]:
    strides = [stride // array.itemsize for stride in array.strides]
    return ctypes.c_void_p(array.ctypes.data), (ctypes.c_longlong * 4)(*strides)
