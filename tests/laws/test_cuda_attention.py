"""Laws of the CUDA attention kernel, run on a CPU: it is attention in float32, whatever the shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_dspark.kernels.cuda_attention.attend import plan, takes
from tests.cuda_shim.attention import Variant, attend, compiled

Shapes = tuple[tuple[int, int], int, int]
"""Heads of queries and of keys, width, length."""

WHOLE: list[Shapes] = [
    ((9, 3), 5, 33),
    ((9, 3), 9, 100),
    ((9, 3), 1, 150),
    ((8, 1), 5, 9),
    ((8, 1), 9, 33),
    ((4, 4), 1, 9),
    ((4, 4), 9, 16),
]
SPLIT: list[Shapes] = [((9, 3), 1, 1040), ((6, 2), 9, 1040)]
FORMS = {mx.float16: (64, 8, 3e-3), mx.bfloat16: (128, 4, 2e-2)}
"""Head size, warps and what rounding to the dtype may cost."""


def reference(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], mask: NDArray[Any] | None, sinks: NDArray[Any] | None
) -> NDArray[Any]:
    """Attention in float32; nothing where nothing is seen."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("bhwd,bhld->bhwl", q, np.repeat(k, group, 1)) * q.shape[3] ** -0.5
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    if sinks is not None:
        most = np.maximum(most, sinks[:, None, None])
    most = np.where(np.isinf(most), 0, most)
    shares = np.exp(scores - most)
    total = shares.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - most)
    return np.einsum("bhwl,bhld->bhwd", shares / np.where(total == 0, 1, total), np.repeat(v, group, 1))


def error(
    library: ctypes.CDLL, variant: Variant, heads: tuple[int, int], width: int, length: int
) -> float | None:
    """The largest difference from the reference; None where these shapes are not of the variant."""
    rows = 2 if variant.mask == 2 else 1
    shape = (rows, heads[0], width, variant.dim), (rows, heads[1], length, variant.dim)
    if (plan(*shape)[2] > 1) != variant.split or length < width:
        return None
    rng = np.random.default_rng(length + width)

    def made(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(variant.dtype)

    queries = made(rows, width, heads[0], variant.dim)
    keys, values = (made(rows, heads[1], length + 7, variant.dim) for _ in range(2))
    sinks = made(heads[0]) if variant.sinks else None
    mask = None
    if variant.mask == 1:
        mask = (np.arange(length) <= np.arange(length - width, length)[:, None])[None, None]
    elif variant.mask == 2:
        mask = rng.random((rows, 1, width, length)) < 0.5
        mask[0, 0, 0] = False
    given = mask if variant.mask == 2 else None
    got = attend(library, queries, (keys, length), (values, length), variant.dim**-0.5, given, sinks)
    plain = [np.array(each.astype(mx.float32)) for each in (queries, keys, values)]
    wanted = reference(
        plain[0].swapaxes(1, 2),
        plain[1][:, :, :length],
        plain[2][:, :, :length],
        mask,
        np.array(sinks.astype(mx.float32)) if sinks is not None else None,
    )
    difference = float(np.abs(got - wanted).max())
    return difference if np.isfinite(difference) else np.inf


def errors(
    variant: Variant, folder: Path, shapes: Iterable[Shapes], change: tuple[str, str] | None = None
) -> list[float]:
    library = compiled(variant, folder, change)
    found = [error(library, variant, *shape) for shape in shapes]
    return [each for each in found if each is not None]


@pytest.mark.parametrize(
    ("mask", "sinks", "split"),
    [(0, False, False), (1, False, False), (2, True, False), (1, True, True), (2, False, True)],
    ids=["all", "causal", "mask and sinks", "causal with sinks in splits", "mask in splits"],
)
@pytest.mark.parametrize("dtype", FORMS, ids=str)
def test_the_kernel_is_attention_in_float32(
    dtype: mx.Dtype, mask: int, sinks: bool, split: bool, tmp_path: Path
) -> None:
    dim, warps, rounding = FORMS[dtype]
    shapes = SPLIT if split else WHOLE
    found = errors(Variant(dtype, dim, warps, mask, sinks, split), tmp_path, shapes)
    assert len(found) == len(shapes)
    assert max(found) < rounding


CHANGES = {
    "sees one key more": ("length - width + place[i >> 1];", "length - width + place[i >> 1] + 1;"),
    "starts one tile late": ("int tile = from + warp;", "int tile = from + warp + 1;"),
    "forgets to rescale": ("out_sum[j][2 * i] *= kept, ", ""),
    "sums the wrong warp": ("out_sum[j][2 * i + e] = a *", "out_sum[j][2 * i + e] = b *"),
    "swaps halves of a value": ("j & 1 ? 0x7632 : 0x5410", "j & 1 ? 0x5410 : 0x7632"),
    "takes another head": ("(real[i] ? n : queries - 1) / width;", "(real[i] ? n : queries - 1) % group;"),
    "stops one tile early": ("tile < to; tile += WARPS", "tile + 1 < to; tile += WARPS"),
    "adds lanes twice": ("x + __shfl_xor_sync(0xffffffffu, x, 2)", "x + __shfl_xor_sync(0xffffffffu, x, 1)"),
    "leaves out the scale": ("scale[0] * LOG2E", "LOG2E"),
    "reads a key's other dims": (
        "c * MINE * k_strides[3], k_strides[3]",
        "g * MINE * k_strides[3], k_strides[3]",
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_for_the_worse_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    dim, warps, rounding = FORMS[mx.float16]
    found = errors(Variant(mx.float16, dim, warps, 1, False, False), tmp_path, WHOLE[:3], change)
    assert max(found) > rounding


@pytest.mark.parametrize(
    ("dtype", "dim", "mask"),
    [(mx.float32, 64, None), (mx.float16, 80, None), (mx.float16, 64, mx.zeros((1, 9)))],
    ids=["float32", "head size", "mask of numbers"],
)
def test_other_calls_are_not_taken(dtype: mx.Dtype, dim: int, mask: mx.array | None) -> None:
    queries, keys = mx.zeros((1, 4, 2, dim), dtype), mx.zeros((1, 2, 9, dim), dtype)
    assert not takes(queries, keys, mask, None)


@pytest.mark.parametrize("length", [1, 500, 1025, 4000, 40_000, 130_000])
@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (64, 4)])
def test_keys_are_split_so_that_every_range_has_some(heads: tuple[int, int], length: int) -> None:
    for dim, width in product((64, 128), (1, 8, 32)):
        warps, parts, splits = plan((1, heads[0], width, dim), (1, heads[1], length, dim))
        assert parts * 16 >= heads[0] // heads[1] * width
        assert 1 <= splits <= max(1, -(-length // 16) // (2 * warps))
