"""What a way of holding weights is: a source from the model, a matrix that multiplies and looks rows up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Exact types: a subclass may compute something else.
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)
_DENSE = (nn.Linear, nn.Embedding)


@dataclass(frozen=True)
class Source:
    """One weight matrix [outputs, inputs] as the model holds it.

    Quantized: `weight` is uint32 [outputs, inputs * bits / 32], `scales` and `biases` [outputs, groups].
    Dense: `weight` is floating [outputs, inputs], `bits` is 0 and the rest is absent.
    """

    outputs: int
    inputs: int
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0
    mode: str = "dense"

    @classmethod
    def of(cls, module: nn.Module) -> Source | None:
        """The matrix of a linear or embedding module; None for every other module."""
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding) and _same_matrix(module):
            weight = module["weight"]
            assert module.bits is not None
            assert module.group_size is not None
            return cls(
                outputs=weight.shape[0],
                inputs=weight.shape[1] * 32 // module.bits,
                weight=weight,
                scales=module["scales"],
                biases=module.get("biases"),
                bits=module.bits,
                group_size=module.group_size,
                mode=module.mode,
            )
        if type(module) in _DENSE:
            weight = module["weight"]
            return cls(outputs=weight.shape[0], inputs=weight.shape[1], weight=weight)
        return None

    @property
    def kind(self) -> str:
        """Shape, number format and grouping: matrices of one kind cost the same."""
        form = f"{self.bits}b-g{self.group_size}-{self.mode}" if self.bits else str(self.weight.dtype)
        return f"{self.outputs}x{self.inputs}-{form}"

    def float32_scales(self) -> tuple[mx.array, mx.array | None]:
        """Scales and biases of a quantized matrix; affine ones in float32, as MLX computes in their type."""
        assert self.scales is not None
        if self.biases is None:
            return self.scales, None
        return self.scales.astype(mx.float32), self.biases.astype(mx.float32)

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs


def _same_matrix(module: nn.Module) -> bool:
    """Whether it is MLX's own class, or one of ours that says it has its matrix and its product."""
    return type(module) in _QUANTIZED or bool(getattr(type(module), "same_matrix", False))


class HeldMatrix(Protocol):
    """A weight matrix [outputs, inputs] in the layout of one way, computing in float32."""

    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int: ...

    def multiply(self, rows: Floats) -> Floats:
        """[rows, inputs] -> [rows, outputs], the product with the transposed matrix."""
        ...

    def lookup(self, indices: NDArray[np.int64]) -> Floats:
        """[n] -> [n, inputs], the matrix rows of those numbers."""
        ...


class Way(Protocol):
    """A way of holding weights: what it is called, what it takes, and how it makes a matrix."""

    name: str
    version: int

    def refusal(self, source: Source) -> str | None:
        """Why this way cannot hold the matrix; None when it can."""
        ...

    def hold(self, source: Source) -> HeldMatrix: ...
