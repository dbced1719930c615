"""The tensors of a GGUF file as MLX arrays, one at a time, and what holding them cost in accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf import ReaderTensor
from gguf.quants import dequantize

from mlx_dspark.catalog.gguf.blocks import GRIDS, GROUP, REQUANTIZED_BITS, pack
from mlx_dspark.catalog.gguf.file import FETCH_AGAIN, GGUFFile
from mlx_dspark.foundation.errors import BadCheckpoint

DENSE = {GGMLType.F32: mx.float32, GGMLType.F16: mx.float16, GGMLType.BF16: mx.bfloat16}
_AT_ONCE = 1 << 22
"""Weights that are held dense in float32 at a time."""


@dataclass(frozen=True)
class Requantized:
    """What a model lost because MLX cannot hold some of its tensors as the file does.

    types   the file's formats of these tensors, sorted
    tensors how many there are
    mean    their relative errors' mean: RMS of the difference over RMS of the file's own weights
    worst   the greatest of them
    tensor  the GGUF name of the tensor it belongs to
    """

    types: tuple[str, ...]
    tensors: int
    mean: float
    worst: float
    tensor: str

    def __str__(self) -> str:
        return (
            f"{', '.join(self.types)} requantized: relative error {self.mean:.2%} in the mean of "
            f"{self.tensors} tensors, {self.worst:.2%} in {self.tensor}"
        )

    @classmethod
    def of(cls, losses: Iterable[Loss]) -> Requantized | None:
        """The report on the tensors that lost something; None where none did."""
        lossy = [loss for loss in losses if loss.error > 0]
        if not lossy:
            return None
        worst = max(lossy, key=lambda loss: loss.error)
        mean = math.fsum(loss.error for loss in lossy) / len(lossy)
        return cls(tuple(sorted({loss.type for loss in lossy})), len(lossy), mean, worst.error, worst.tensor)


class Loss(NamedTuple):
    """The relative RMS error of one tensor, of a format called `type`."""

    tensor: str
    type: str
    error: float


class Read(NamedTuple):
    """One tensor: `weight`, with `scales` and `biases` when it is quantized. Rows are in the file's order."""

    parts: dict[str, mx.array]
    error: float = 0.0


def held_bits(tensor: ReaderTensor) -> int:
    """The width in bits that a tensor is quantized to in MLX; 0 for one that is held dense."""
    if tensor.tensor_type in DENSE or len(tensor.shape) != 2:
        return 0
    grid = GRIDS.get(tensor.tensor_type)
    return REQUANTIZED_BITS if grid is None else grid.bits


def float_type(tensors: Iterable[ReaderTensor], *, on_cpu: bool) -> mx.Dtype:
    """The type of scales, biases, norms, and of what is computed.

    float32 on the CPU, whose kernels compute in it. Elsewhere that of the matrices where none is quantized,
    and float16 where any is: it holds the scales of most formats exactly, and bfloat16 would round them.
    """
    matrices = {tensor.tensor_type for tensor in tensors if len(tensor.shape) == 2}
    if on_cpu or matrices == {GGMLType.F32}:
        return mx.float32
    return mx.bfloat16 if matrices <= {GGMLType.BF16, GGMLType.F32} else mx.float16


def read_tensor(file: GGUFFile, tensor: ReaderTensor, dtype: mx.Dtype) -> Read:
    """One tensor, its scales and biases in `dtype`, evaluated, and the relative RMS error of that.

    A dense matrix keeps the file's type where `dtype` is float32, to which the 16-bit types promote; any
    other dense tensor is turned to `dtype`. Raises UnsupportedModel for a format that the `gguf` package
    cannot read, BadCheckpoint for weights that are not finite in `dtype`.
    """
    try:
        with np.errstate(all="ignore"):
            read = _quantized(tensor, dtype) if held_bits(tensor) else _dense(tensor, dtype)
    except NotImplementedError:
        raise file.unsupported(
            f"the tensor {tensor.name} of type {tensor.tensor_type.name}",
            "weights of another type, such as Q4_K or Q8_0",
        ) from None
    mx.eval(list(read.parts.values()))
    floats = [part for part in read.parts.values() if part.dtype != mx.uint32]
    if not (math.isfinite(read.error) and all(mx.isfinite(part).all().item() for part in floats)):
        raise BadCheckpoint(
            f"{file.path} holds weights in {tensor.name} that are not finite in {_called(dtype)}.",
            FETCH_AGAIN,
        )
    return read


def quantization_section(bits_of: dict[str, int]) -> dict[str, Any]:
    """config.json's section for modules of these widths; its top level names the commonest one.

    Empty for none. A module that differs has an entry of its own, under its name.
    """
    if not bits_of:
        return {}
    widths = list(bits_of.values())
    common = max(sorted(set(widths)), key=widths.count)
    section: dict[str, Any] = {"group_size": GROUP, "bits": common, "mode": "affine"}
    others = {name: bits for name, bits in bits_of.items() if bits != common}
    return section | {name: {"group_size": GROUP, "bits": bits} for name, bits in others.items()}


def _dense(tensor: ReaderTensor, dtype: mx.Dtype) -> Read:
    stored = DENSE.get(tensor.tensor_type)
    if stored is None:
        weight = mx.array(dequantize(tensor.data, tensor.tensor_type))
    elif stored == mx.bfloat16:
        weight = mx.array(tensor.data.view(np.uint16)).view(mx.bfloat16)
    else:
        weight = mx.array(tensor.data)
    if dtype == mx.float32 and weight.ndim == 2:
        return Read({"weight": weight})
    held = weight.astype(dtype)
    if weight.ndim != 2 or dtype == weight.dtype:
        return Read({"weight": held})
    exact = weight.astype(mx.float32)
    return Read({"weight": held}, _relative(_squares(held.astype(mx.float32) - exact), _squares(exact)))


def _quantized(tensor: ReaderTensor, dtype: mx.Dtype) -> Read:
    """A matrix in slices of rows, so that no more than a slice of it is ever dense."""
    kind, bits = tensor.tensor_type, held_bits(tensor)
    grid = GRIDS.get(kind)
    is_exact = grid is not None and (grid.half or dtype == mx.float32)
    slices: list[_Held] = []
    lost = whole = 0.0
    for rows in _slices(tensor):
        if grid is None:
            dense = mx.array(dequantize(rows, kind))
            full = _Held(*mx.quantize(dense, GROUP, bits))
        else:
            codes, scales, biases = grid.read(rows)
            full = _Held(mx.array(pack(codes, bits)), mx.array(scales), mx.array(biases))
            dense = full.dense(bits)
        held = _Held(full.weight, full.scales.astype(dtype), full.biases.astype(dtype))
        mx.eval(held)
        slices.append(held)
        if not is_exact:
            lost += _squares(held.dense(bits) - dense)
            whole += _squares(dense)
    parts = {name: mx.concatenate([getattr(held, name) for held in slices]) for name in _Held._fields}
    return Read(parts, _relative(lost, whole))


class _Held(NamedTuple):
    """Some rows of a matrix as MLX holds them."""

    weight: mx.array
    scales: mx.array
    biases: mx.array

    def dense(self, bits: int) -> mx.array:
        scales, biases = self.scales.astype(mx.float32), self.biases.astype(mx.float32)
        return mx.dequantize(self.weight, scales, biases, group_size=GROUP, bits=bits)


def _relative(lost: float, whole: float) -> float:
    return math.sqrt(lost / whole) if whole else 0.0


def _squares(array: mx.array) -> float:
    return cast(float, mx.square(array).sum().item())


def _slices(tensor: ReaderTensor) -> Iterator[np.ndarray]:
    rows = max(1, _AT_ONCE // int(tensor.shape[0]))
    return (tensor.data[start : start + rows] for start in range(0, len(tensor.data), rows))


def _called(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
