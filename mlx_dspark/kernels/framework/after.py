"""Inputs of a launch made of the result of another, so that a device cannot begin with one before the other
is done. Arrays are looked at anew, not computed, where that can be."""

from __future__ import annotations

from math import prod

import mlx.core as mx


def numbers_of(out: mx.array, shape: tuple[int, ...]) -> mx.array:
    """`shape`, the first numbers of a result; repeated, by one small copy, where it has too few."""
    wanted, flat = prod(shape), out.reshape(-1)
    if flat.size < wanted:
        flat = mx.tile(flat, -(-wanted // flat.size))
    return flat[:wanted].reshape(shape)


def queries_of(out: mx.array) -> mx.array:
    """`[batch, heads, width, head_dim]`, the result of an attention, laid out as a model's queries: width
    before heads. A result of another layout is copied, as it is in a model."""
    return mx.contiguous(out.swapaxes(1, 2)).swapaxes(1, 2)
