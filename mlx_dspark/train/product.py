"""Products with weight matrices in the layouts that the CPU back end's BLAS is fast at.

It is less than half as fast at a product with a transposed right side (`x @ w.T`) as at the others. MLX's own
gradients of a product with a copy of `w.T` would need such a product again; these do not.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn


def product(x: mx.array, weight: mx.array) -> mx.array:
    """`x` `[..., inputs]` times the transpose of `weight` `[outputs, inputs]`: `[..., outputs]`."""
    return cast(mx.array, _product(x, weight))


@mx.custom_function
def _product(x: mx.array, weight: mx.array) -> mx.array:
    return x @ mx.contiguous(weight.T)


@_product.vjp
def _gradients(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    del output
    x, weight = primals
    return cotangent @ weight, cotangent.reshape(-1, weight.shape[0]).T @ x.reshape(-1, weight.shape[1])


class CpuLinear(nn.Linear):
    """`nn.Linear` by `product`."""

    def __call__(self, x: mx.array) -> mx.array:
        out = product(x, self["weight"])
        return out + self["bias"] if "bias" in self else out


def use_products(model: nn.Module) -> None:
    """Let every linear module of `model` multiply by `product`; its parameters stay where they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CpuLinear
