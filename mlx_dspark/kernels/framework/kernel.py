"""What a kernel is: something asked for one case at a time, that MLX and a float32 reference can be asked for
too. A kernel is a folder beside this one, and knows nothing of the probe that admits its cases."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source

_ATTENTION = re.compile(r"h(\d+)-kv(\d+)-d(\d+)-s(\d+)-(float16|bfloat16|float32)(-sinks)?")

Inputs = Any
"""A NamedTuple of arrays and numbers, of the kernel's own."""

Geometry = Hashable
"""How a launch is laid out, of the kernel's own: a tuple or a frozen dataclass. Its `repr` is shown to people
and is the same in every process."""


@dataclass(frozen=True, order=True)
class Case:
    """One thing a kernel is asked for.

    shape  as text: "4096x4096-4b-g64-float16" is outputs x inputs of a matrix and how it is held,
           "h32-kv8-d128-s8192-float16" query heads, key heads, head size and keys of an attention
    width  rows of x, or queries
    """

    shape: str
    width: int

    def __str__(self) -> str:
        return f"{self.shape} x {self.width}"


class Kernel(Protocol):
    """What the probe asks of a kernel. Nothing here knows a model."""

    @property
    def name(self) -> str:
        """What people call it: "metal-small-m"."""
        ...

    @property
    def version(self) -> int:
        """Counts its sources: verdicts on another version do not count."""
        ...

    @property
    def back_end(self) -> str:
        """Where it runs: "metal", "cuda", or "any"."""
        ...

    def draw(self, case: Case, seed: int) -> Inputs:
        """Random inputs of this case, evaluated."""
        ...

    def geometries(self, case: Case) -> Sequence[Geometry]:
        """Ways to lay the launch out: the best guess first, smaller ones last, which old devices take too."""
        ...

    def launch(self, inputs: Inputs, geometry: Geometry) -> mx.array:
        """The result, not evaluated. A device that refuses the launch raises ValueError at evaluation."""
        ...

    def stock(self, inputs: Inputs) -> mx.array:
        """What MLX computes without the kernel, not evaluated."""
        ...

    def after(self, inputs: Inputs, out: mx.array) -> Inputs:
        """The same inputs with `out`, a result, in place of some of them (`framework/after.py`): the device
        begins with them when it has `out`. This may cost it next to nothing, and the numbers may be any."""
        ...

    def reference(self, inputs: Inputs) -> NDArray[np.float32]:
        """The result in float32 on exactly dequantized weights; never MLX's own in few bits."""
        ...

    def tolerance(self, case: Case) -> float:
        """Largest error, as a share of the largest output: one unit in the last place of the output."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A kernel that names what `mlx-dspark kernels --check` is to try, whatever the model."""

    def check_cases(self) -> Sequence[Case]: ...


@runtime_checkable
class Exact(Protocol):
    """A kernel that is used only where it gives the very bits that MLX gives."""

    @property
    def same_bits(self) -> bool: ...


@runtime_checkable
class MatrixKernel(Kernel, Protocol):
    """A kernel that stands in for the product with a weight matrix of the model."""

    @property
    def widths(self) -> Sequence[int]:
        """Rows of x that it is raced at, rising: numbers of rows from the first to the last may be served,
        those between two widths where both were admitted, laid out as for the wider."""
        ...

    def refusal(self, source: Source, dtype: mx.Dtype) -> str | None:
        """Why it does not take this matrix with x of this type; None where it does."""
        ...

    def case(self, source: Source, dtype: mx.Dtype, width: int) -> Case: ...

    def multiply(self, x: mx.array, source: Source, geometry: Geometry) -> mx.array:
        """[.., inputs] -> [.., outputs] in the type of x, the product with the transposed matrix, not
        evaluated."""
        ...


@runtime_checkable
class TogetherKernel(MatrixKernel, Protocol):
    """A kernel that multiplies one x with several matrices by one launch, which are held alike."""

    @property
    def most_together(self) -> int: ...

    def multiply_together(
        self, x: mx.array, sources: Sequence[Source], geometry: Geometry
    ) -> Sequence[mx.array]:
        """`multiply` of each, bit for bit."""
        ...


@runtime_checkable
class ExpertsKernel(MatrixKernel, Protocol):
    """A kernel over the experts of a layer: its sources have a first axis more, and it gathers."""

    def gather(self, x: mx.array, source: Source, experts: mx.array, geometry: Geometry) -> mx.array:
        """[rows, 1, inputs] -> [rows, 1, outputs], not evaluated; `experts` [rows] rises."""
        ...


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer: `length` keys; `sinks` where heads have one in their softmax."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    length: int
    sinks: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).rpartition(".")[2] + ("-sinks" if self.sinks else "")
        return f"h{self.heads}-kv{self.kv_heads}-d{self.head_dim}-s{self.length}-{kind}"

    @classmethod
    def parse(cls, text: str) -> AttentionShape:
        """Raises ValueError for what is not written by `str`."""
        found = _ATTENTION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no shape of an attention")
        heads, kv_heads, head_dim, length = (int(each) for each in found.groups()[:4])
        return cls(heads, kv_heads, head_dim, getattr(mx, found[5]), length, found[6] is not None)

    def at(self, length: int) -> AttentionShape:
        """The same attention over so many keys."""
        return replace(self, length=length)


@runtime_checkable
class AttentionKernel(Kernel, Protocol):
    """A kernel that stands in for attention of a few queries."""

    @property
    def widths(self) -> Sequence[int]:
        """Queries that it is raced at, rising, which serve others as the widths of a MatrixKernel do."""
        ...

    @property
    def lengths(self) -> Sequence[int]:
        """Keys that it is raced at, rising. An admitted length serves from there up to the next."""
        ...

    def refusal(self, shape: AttentionShape) -> str | None:
        """Why it does not take such an attention; None where it does."""
        ...

    def case(self, shape: AttentionShape, width: int) -> Case: ...

    def takes(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, sinks: mx.array | None
    ) -> bool:
        """Whether it computes this very call: layouts and masks too. Cheap, and evaluates nothing."""
        ...

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        geometry: Geometry,
    ) -> mx.array:
        """[batch, heads, width, head_dim] in the type of the queries, not evaluated."""
        ...
