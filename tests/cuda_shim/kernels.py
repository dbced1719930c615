"""Stands in for `mx.fast.cuda_kernel`: builds the function as MLX does, and runs it on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from mlx_dspark.kernels.cuda_common.build import source_text
from tests.cuda_shim.compiling import HERE, NAMES, compiled_text

_LANES = source_text("cuda_common", "lanes.cuh")
"""The instructions of a device, which lanes.hpp has for the CPU."""
_TYPES = {**NAMES, mx.uint32: "uint32_t", mx.int32: "int32_t", mx.float32: "float", mx.bool_: "bool"}
_COUNTED = ("weights", "weights_1", "weights_2", "k", "v")
_LIBRARIES: dict[str, ctypes.CDLL] = {}
_ABOUT = {"shape": "const Shape", "strides": "const Strides", "ndim": "const int"}


class CpuKernels:
    """Kernels by their text; `change` replaces a piece that is there once in one of them. After a call
    `pieces` are the 16-byte pieces that its copies read of weights, keys and values, and `most_reads` how
    often one of them was read."""

    def __init__(self, folder: Path, change: tuple[str, str] | None = None) -> None:
        self._folder = folder
        self._change = change
        self.pieces = self.most_reads = 0

    def __call__(self, *, header: str, source: str, **form: Any) -> Callable[..., list[mx.array]]:
        assert header.startswith(_LANES)
        header = header.removeprefix(_LANES)
        if self._change is not None:
            header, source = self._changed(header, source, *self._change)

        def run(**call: Any) -> list[mx.array]:
            return self._run(self._compiled(header, source, form, call), source, form, call)

        return run

    def _changed(self, header: str, source: str, old: str, new: str) -> tuple[str, str]:
        if (header + source).count(old) > 1:
            raise ValueError(f"{old!r} is there more than once")
        return header.replace(old, new), source.replace(old, new)

    def _compiled(self, header: str, source: str, form: dict[str, Any], call: dict[str, Any]) -> ctypes.CDLL:
        parameters = _parameters(source, form["input_names"], call["inputs"])
        types = [kind for kind, _ in parameters]
        types += [f"{_TYPES[dtype]}*" for dtype in call["output_dtypes"]]
        names = [name for _, name in parameters] + form["output_names"]
        text = Template((HERE / "kernels.cpp.in").read_text()).substitute(
            header=header,
            name=form["name"],
            source=source,
            parameters=", ".join(f"{kind} {name}" for kind, name in zip(types, names, strict=True)),
            arguments=", ".join(_argument(kind, i) for i, kind in enumerate(types)),
        )
        if text not in _LIBRARIES:
            place = self._folder / form["name"]
            place.mkdir()
            _LIBRARIES[text] = compiled_text(text, place)
            _LIBRARIES[text].run.restype = ctypes.c_char_p
        return _LIBRARIES[text]

    def _run(
        self, library: ctypes.CDLL, source: str, form: dict[str, Any], call: dict[str, Any]
    ) -> list[mx.array]:
        given: list[NDArray[Any]] = []
        spans: list[int] = []
        for name, array in zip(form["input_names"], call["inputs"], strict=True):
            numbers = _bits(array)
            if form.get("ensure_row_contiguous", True):
                numbers = np.ascontiguousarray(numbers)
            numbers = _aligned(numbers)
            given.append(numbers)
            spans += [*_span(numbers), name in _COUNTED]
            given += [about for kind, about in _about(numbers) if f"{name}_{kind}" in source]
        fenced = [
            _Fenced(shape, np.uint16 if dtype in NAMES else np.float32)
            for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ]
        outs = [each.numbers for each in fenced]
        places = (ctypes.c_void_p * (len(given) + len(outs)))(*(each.ctypes.data for each in (*given, *outs)))
        threads = call["threadgroup"][0]
        x, y, z = call["grid"]
        grid = (ctypes.c_int * 3)(-(-x // threads), y, z)
        said = library.run(
            places,
            (ctypes.c_int64 * len(spans))(*spans),
            len(spans) // 3,
            grid,
            threads,
            form["shared_memory"],
        )
        assert all(each.whole for each in fenced), "leaves its outputs"
        assert said is None, said
        if library.pieces():
            self.pieces, self.most_reads = library.pieces(), library.most_reads()
        return [
            mx.array(out).view(dtype) if dtype in NAMES else mx.array(out)
            for out, dtype in zip(outs, call["output_dtypes"], strict=True)
        ]


class _Fenced:
    """An output, full of what is no number, with bytes around it that nobody may change."""

    ROOM, MARK = 1 << 16, 0xA5

    def __init__(self, shape: Sequence[int], kind: type[np.uint16] | type[np.float32]) -> None:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        self._held = np.full(size + 2 * self.ROOM, self.MARK, np.uint8)
        inside = self._held[self.ROOM : self.ROOM + size]
        inside[:] = 0xFF
        self.numbers = inside.view(kind).reshape(shape)

    @property
    def whole(self) -> bool:
        around = self._held[: self.ROOM], self._held[-self.ROOM :]
        return all((each == self.MARK).all() for each in around)


def _parameters(source: str, names: Sequence[str], inputs: Sequence[mx.array]) -> list[tuple[str, str]]:
    found = []
    for name, array in zip(names, inputs, strict=True):
        found.append((f"const {_TYPES[array.dtype]}*", name))
        found += [(kind, f"{name}_{about}") for about, kind in _ABOUT.items() if f"{name}_{about}" in source]
    return found


def _about(numbers: NDArray[Any]) -> list[tuple[str, NDArray[Any]]]:
    def ten(values: Sequence[int], kind: type[np.signedinteger[Any]]) -> NDArray[Any]:
        return np.array([*values, *[0] * 10][:10], kind)

    strides = [stride // numbers.itemsize for stride in numbers.strides]
    ndim = np.array([numbers.ndim], np.int32)
    return [("shape", ten(numbers.shape, np.int32)), ("strides", ten(strides, np.int64)), ("ndim", ndim)]


def _argument(kind: str, number: int) -> str:
    if kind.endswith("*"):
        return f"({kind})given[{number}]"
    plain = kind.removeprefix("const ")
    plain = plain if plain == "int" else f"mlx::core::cu::{plain}"
    return f"*({plain}*)given[{number}]"


def _bits(array: mx.array) -> NDArray[Any]:
    return np.asarray(array.view(mx.uint16) if array.dtype in NAMES else array)


def _aligned(numbers: NDArray[Any]) -> NDArray[Any]:
    """The same as it lies, with what lies between, the first number at a multiple of 16 bytes."""
    begin, end = _span(numbers)
    count, each = (end - begin) // numbers.itemsize, numbers.itemsize
    room = np.empty(count + 16, numbers.dtype)
    copy = room[-room.ctypes.data % 16 // each :][:count]
    copy[:] = as_strided(numbers, (count,), (each,))
    return as_strided(copy, numbers.shape, numbers.strides)


def _span(numbers: NDArray[Any]) -> tuple[int, int]:
    """Where the numbers begin and end."""
    steps = [(size - 1) * stride for size, stride in zip(numbers.shape, numbers.strides, strict=True)]
    return numbers.ctypes.data, numbers.ctypes.data + sum(steps) + numbers.itemsize
