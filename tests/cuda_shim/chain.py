"""Runs the Markov chain's kernel on the CPU, step by step, as `GreedyChain` would."""

from __future__ import annotations

import ctypes
from pathlib import Path
from string import Template
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import mlx_dspark.kernels.cuda_chain as home
from mlx_dspark.kernels.cuda_chain.chain import BLOCKS, ROWS, GreedyChain, defines, names
from tests.cuda_shim.compiling import HERE, NAMES, changed, compiled_text

SOURCES = Path(home.__file__).parent
INPUTS = [
    "base",
    "at",
    "anchors",
    "table",
    "table_scales",
    "table_biases",
    "weights",
    "scales",
    "biases",
    "ids",
    "before",
    "before_index",
    "tokens_before",
]


def greedy(
    chain: GreedyChain, base: mx.array, anchors: mx.array, folder: Path, change: tuple[str, str] | None = None
) -> NDArray[np.int32]:
    """As `chain(base, anchors)`."""
    rows, width, vocab = base.shape
    blocks = min(BLOCKS, -(-vocab // ROWS))
    found: list[NDArray[Any]] = []
    library: dict[tuple[bool, bool], ctypes.CDLL] = {}
    for slot in range(width + 1):
        first, last = not slot, slot == width
        form = (first, last, chain.table.packed, chain.project.packed, chain.ids is not None)
        inputs, _ = names(*form)
        given = [base, mx.array([slot], mx.int32), anchors.astype(mx.int32)]
        given += [*chain.table.arrays, *chain.project.arrays, *([chain.ids] if chain.ids is not None else [])]
        arrays = [*map(_bits, given), *found]
        assert len(arrays) == len(inputs)
        held = dict(zip(inputs, arrays, strict=True))
        if (first, last) not in library:
            place = folder / f"{first}{last}"
            place.mkdir()
            library[first, last] = _compiled(chain, base.dtype, form, place, change)
        out = (np.full((rows, blocks), np.nan, np.float32), np.zeros((rows, blocks), np.int32))
        tokens = np.full((rows, width), -1, np.int32)
        sizes = np.array([rows, width, vocab, 1 if last else blocks, blocks], np.int32)
        call = library[first, last].step
        call.restype = ctypes.c_char_p
        said = call(_at(sizes), *(_at(held.get(name)) for name in INPUTS), *map(_at, (*out, tokens)))
        assert said is None, said
        found = [*out, tokens]
    return found[-1]


def _compiled(
    chain: GreedyChain,
    dtype: mx.Dtype,
    form: tuple[bool, bool, bool, bool, bool],
    folder: Path,
    change: tuple[str, str] | None,
) -> ctypes.CDLL:
    source = changed({name: (SOURCES / name).read_text() for name in ("numbers.cuh", "step.cu")}, change)
    header = source["numbers.cuh"].replace("#include <cuda_bf16.h>", "").replace("#include <cuda_fp16.h>", "")
    text = Template((HERE / "chain.cpp.in").read_text()).substitute(
        defines=defines(*form),
        header=header,
        body=source["step.cu"],
        dtype=NAMES[dtype],
        rank=chain.rank,
        table_bits=chain.table.bits,
        table_group=chain.table.group,
        bits=chain.project.bits,
        group=chain.project.group,
    )
    return compiled_text(text, folder)


def _bits(array: mx.array) -> NDArray[Any]:
    return np.array(array.view(mx.uint16) if array.dtype in NAMES else array)


def _at(array: NDArray[Any] | None) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)
