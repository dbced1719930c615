"""Which products the kernel takes, and the text that names one."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlx.core as mx

from mlx_dspark.kernels.base import Source

BITS = (4, 8)
GROUPS = (32, 64, 128)
MOST_ROWS = 16
HALVES = {"float16": mx.float16, "bfloat16": mx.bfloat16}

_FORM = re.compile(r"(\d+)x(\d+)-(\d+)b-g(\d+)-(\w+)")


@dataclass(frozen=True)
class Shape:
    """A packed matrix and the type of its scales, of x and of the product."""

    outputs: int
    inputs: int
    bits: int
    group: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, source: Source, dtype: mx.Dtype) -> Shape:
        return cls(source.outputs, source.inputs, source.bits, source.group_size, dtype)

    @classmethod
    def read(cls, text: str) -> Shape:
        """From "4096x12288-4b-g64-float16". Raises ValueError for anything else."""
        found = _FORM.fullmatch(text)
        if found is None or found[5] not in HALVES:
            raise ValueError(f"{text!r} is not a shape such as 4096x12288-4b-g64-float16")
        outputs, inputs, bits, group = (int(each) for each in found.groups()[:4])
        return cls(outputs, inputs, bits, group, HALVES[found[5]])

    def __str__(self) -> str:
        kind = str(self.dtype).rpartition(".")[2]
        return f"{self.outputs}x{self.inputs}-{self.bits}b-g{self.group}-{kind}"

    @property
    def nbytes(self) -> int:
        """What a product reads of the matrix: codes, scales and biases."""
        return self.outputs * (self.inputs * self.bits // 8 + self.inputs // self.group * 4)


def refusal(source: Source, dtype: mx.Dtype) -> str | None:
    """Why the kernel does not take this matrix with x of `dtype`; None where it does."""
    if source.mode != "affine" or source.bits not in BITS or source.group_size not in GROUPS:
        return f"{source.kind} is not affine with 4 or 8 bits in groups of 32, 64 or 128"
    if source.scales is None or source.biases is None or dtype not in HALVES.values():
        return f"x is {dtype}, not float16 or bfloat16"
    if source.scales.dtype != dtype or source.biases.dtype != dtype:
        return f"the scales are {source.scales.dtype} and x is {dtype}"
    return None
