"""Stands in for `mx.fast.cuda_kernel`: builds the function as MLX does, and runs it on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.cuda_small_m.kernel import source_text
from tests.cuda_shim.compiling import HERE, NAMES, compiled_text

_TYPES = {**NAMES, mx.uint32: "uint32_t"}
_LANES = "lanes.cuh"
"""The instructions of a device, which small_m.hpp has for the CPU."""


class CpuKernels:
    """Kernels by their text; `change` replaces a piece that must be there once. After a call `pieces` are the
    16-byte pieces that its copies read, and `most_reads` how often one of them was."""

    def __init__(self, folder: Path, change: tuple[str, str] | None = None) -> None:
        self._folder = folder
        self._change = change
        self.pieces = self.most_reads = 0

    def __call__(self, *, header: str, source: str, **form: Any) -> Callable[..., list[mx.array]]:
        header = header.replace(source_text(_LANES), "")
        if self._change is not None:
            old, new = self._change
            assert (header + source).count(old) == 1, f"{old!r} is not there once"
            header, source = header.replace(old, new), source.replace(old, new)
        held: dict[str, ctypes.CDLL] = {}

        def run(**call: Any) -> list[mx.array]:
            if not held:
                held["it"] = self._compiled(header, source, form, call)
            return self._run(held["it"], source, form, call)

        return run

    def _compiled(self, header: str, source: str, form: dict[str, Any], call: dict[str, Any]) -> ctypes.CDLL:
        parameters = _parameters(source, form["input_names"], call["inputs"])
        types = [kind for kind, _ in parameters]
        types += [f"{_TYPES[dtype]}*" for dtype in call["output_dtypes"]]
        names = [name for _, name in parameters] + form["output_names"]
        text = Template((HERE / "small_m.cpp.in").read_text()).substitute(
            header=header,
            name=form["name"],
            source=source,
            parameters=", ".join(f"{kind} {name}" for kind, name in zip(types, names, strict=True)),
            arguments=", ".join(_argument(kind, i) for i, kind in enumerate(types)),
        )
        place = self._folder / f"{form['name']}-{len(list(self._folder.iterdir()))}"
        place.mkdir()
        library = compiled_text(text, place)
        library.run.restype = ctypes.c_char_p
        return library

    def _run(
        self, library: ctypes.CDLL, source: str, form: dict[str, Any], call: dict[str, Any]
    ) -> list[mx.array]:
        given: list[NDArray[Any]] = []
        weights, places = _side_by_side([each for each in call["inputs"] if _packed(each)])
        counted = (
            ctypes.c_void_p(weights.ctypes.data),
            ctypes.c_void_p(weights.ctypes.data + weights.nbytes),
        )
        for name, array in zip(form["input_names"], call["inputs"], strict=True):
            given.append(next(places) if _packed(array) else _bits(array))
            if f"{name}_shape" in source:
                given.append(np.array([*array.shape, *[0] * 10][:10], np.int32))
            if f"{name}_ndim" in source:
                given.append(np.array([array.ndim], np.int32))
        outs = [np.full(shape, 0xFFFF, np.uint16) for shape in call["output_shapes"]]
        arrays = (ctypes.c_void_p * (len(given) + len(outs)))(*(each.ctypes.data for each in (*given, *outs)))
        threads = call["threadgroup"][0]
        across, down = -(-call["grid"][0] // threads), call["grid"][1]
        said = library.run(arrays, across, down, threads, form["shared_memory"], *counted)
        assert said is None, said
        self.pieces, self.most_reads = library.pieces(), library.most_reads()
        made = zip(outs, call["output_dtypes"], strict=True)
        return [mx.array(out).view(dtype) for out, dtype in made]


def _packed(array: mx.array) -> bool:
    return array.dtype == mx.uint32 and array.ndim > 1


def _side_by_side(arrays: Sequence[mx.array]) -> tuple[NDArray[Any], Iterator[NDArray[Any]]]:
    """Weights in one range of memory, so that what is read of them can be counted, and each of them there."""
    flat = [np.array(each).reshape(-1) for each in arrays]
    whole = np.concatenate(flat)
    ends = np.cumsum([each.size for each in flat])
    return whole, (whole[end - each.size : end] for end, each in zip(ends, flat, strict=True))


def _parameters(source: str, names: Sequence[str], inputs: Sequence[mx.array]) -> list[tuple[str, str]]:
    found = []
    for name, array in zip(names, inputs, strict=True):
        found.append((f"const {_TYPES[array.dtype]}*", name))
        if f"{name}_shape" in source:
            found.append(("const Shape", f"{name}_shape"))
        if f"{name}_ndim" in source:
            found.append(("const int", f"{name}_ndim"))
    return found


def _argument(kind: str, number: int) -> str:
    if kind.endswith("*"):
        return f"({kind})given[{number}]"
    plain = kind.removeprefix("const ").replace("Shape", "mlx::core::cu::Shape")
    return f"*({plain}*)given[{number}]"


def _bits(array: mx.array) -> NDArray[Any]:
    return np.array(array.view(mx.uint16) if array.dtype in NAMES else array)
