"""Runs the kernel of a block's forward on the CPU, phase by phase, as `BlockForward` would."""

from __future__ import annotations

import ctypes
from pathlib import Path
from string import Template
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import mlx_dspark.kernels.cuda_block as home
from mlx_dspark.kernels.cuda_block.forward import BlockForward, Context, defines, names
from tests.cuda_shim.compiling import HERE, NAMES, changed, compiled_text

SOURCES = Path(home.__file__).parent
BLOCKS = 3
INCLUDES = ("#include <cuda_bf16.h>", "#include <cuda_fp16.h>")


def ran(
    forward: BlockForward,
    embedded: mx.array,
    context: Context,
    folder: Path,
    change: tuple[str, str] | None = None,
) -> mx.array:
    """As `forward(embedded, context)`."""
    shape, weights = forward.dimensions, forward.weights
    slots = embedded.shape[1]
    features = context.features
    tail = 0 if features is None else features.shape[0]
    numbers = [context.seen, context.begin, tail, context.position, context.keys[0].shape[2], 1]
    given = [
        mx.zeros((1, shape.features), weights.dtype) if features is None else features,
        embedded.astype(weights.dtype),
        mx.array(numbers, mx.int32),
        *weights.arrays,
        *context.keys,
        *context.values,
    ]
    arrays = [_bits(mx.contiguous(each)) for each in given]
    assert len(arrays) == len(names(shape.layers, weights.bits != 16))
    hidden = np.zeros((1, slots, shape.hidden), np.uint16)
    scratch = np.full(shape.scratch(slots, BLOCKS), np.nan, np.float32)
    library = _compiled(forward, slots, folder, change)
    places = (ctypes.c_void_p * len(arrays))(*(each.ctypes.data for each in arrays))
    out = (ctypes.c_void_p(each.ctypes.data) for each in (hidden, scratch))
    said = library.forward(2 + 5 * shape.layers, BLOCKS, places, *out)
    assert said is None, said
    return mx.array(hidden).view(weights.dtype)


def _compiled(forward: BlockForward, slots: int, folder: Path, change: tuple[str, str] | None) -> ctypes.CDLL:
    shape, weights = forward.dimensions, forward.weights
    source = changed({name: (SOURCES / name).read_text() for name in ("parts.cuh", "forward.cu")}, change)
    header = source["parts.cuh"]
    for include in INCLUDES:
        header = header.replace(include, "")
    packed = weights.bits != 16
    buffers = names(shape.layers, packed)[-2 * shape.layers :]
    text = Template((HERE / "forward.cpp.in").read_text()).substitute(
        header=header + defines(shape, weights.bits, weights.group, slots),
        body=source["forward.cu"],
        dtype=NAMES[weights.dtype],
        packed="const T *scales, *biases;" if packed else "",
        take_packed="scales = (const T*)given[i++], biases = (const T*)given[i++];" if packed else "",
        buffers=", ".join(f"*{name}" for name in buffers),
        take_buffers="".join(f"{name} = (const T*)given[i++];" for name in buffers),
    )
    found = compiled_text(text, folder)
    found.forward.restype = ctypes.c_char_p
    return found


def _bits(array: mx.array) -> NDArray[Any]:
    return np.array(array.view(mx.uint16) if array.dtype in NAMES else array)
