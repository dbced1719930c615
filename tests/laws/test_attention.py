"""Laws of the attention of rows in a rectangle: its products equal MLX's own attention."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.kernels.attention import (
    FEW_ON_CUDA,
    FEW_QUERIES,
    few_queries,
    grouped_attention,
    masked_attention,
    stock_attention,
)

HEADS = [(4, 4), (6, 2), (8, 1)]
"""Query heads, and the heads of keys and values that they share."""

DEPTHS = (9, 40, 17)
"""Keys that the last query of each row sees; the buffer is longer than any."""

ROOM = 48


def arrays(heads: tuple[int, int], width: int, dim: int) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(width + dim)
    shapes = [(heads[0], width), (heads[1], ROOM), (heads[1], ROOM)]
    made = (rng.standard_normal((len(DEPTHS), n, length, dim)) for n, length in shapes)
    queries, keys, values = (mx.array(each.astype(np.float32)) for each in made)
    return queries, keys, values


def ragged(width: int, holes: bool) -> mx.array:
    """`[rows, 1, width, ROOM]`: causal to each row's depth; with `holes` some earlier keys are hidden too."""
    last = np.array(DEPTHS)[:, None] - 1 - np.arange(width)[::-1]
    key = np.arange(ROOM)
    seen = key <= last[:, :, None]
    if holes:
        hidden = np.random.default_rng(7).random((len(DEPTHS), 1, ROOM)) < 0.4
        seen &= ~hidden | (key == last[:, :, None])
    return mx.array(seen[:, None].tolist())


def assert_close(got: mx.array, wanted: mx.array) -> None:
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("holes", [False, True], ids=["causal", "holes"])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("width", [1, 2, 5, FEW_QUERIES, FEW_QUERIES + 1])
@pytest.mark.parametrize("heads", HEADS)
def test_grouped_attention_is_the_stock_one(
    heads: tuple[int, int], width: int, dim: int, holes: bool
) -> None:
    queries, keys, values = arrays(heads, width, dim)
    mask = ragged(width, holes)
    wanted = stock_attention(queries, keys, values, dim**-0.5, mask, None)
    assert_close(grouped_attention(queries, keys, values, dim**-0.5, mask, None), wanted)
    assert_close(masked_attention()(queries, keys, values, dim**-0.5, mask, None), wanted)


@pytest.mark.parametrize("heads", HEADS)
def test_hidden_keys_and_values_do_not_count(heads: tuple[int, int]) -> None:
    """What lies in the buffer past a row's depth, of any finite size, changes nothing."""
    queries, keys, values = arrays(heads, 3, 16)
    beyond = mx.arange(ROOM)[None, None, :, None] >= mx.array(DEPTHS)[:, None, None, None]
    mask = ragged(3, False)
    results = []
    for filler in (0.0, 1e4):
        filled_keys, filled_values = (mx.where(beyond, filler, each) for each in (keys, values))
        results.append(grouped_attention(queries, filled_keys, filled_values, 0.25, mask, None))
    assert mx.array_equal(*results)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_other_masks_and_sinks_are_left_to_mlx(mask: str | None) -> None:
    queries, keys, values = arrays((6, 2), 3, 16)
    wanted = stock_attention(queries, keys, values, 0.25, mask, None)
    assert mx.array_equal(grouped_attention(queries, keys, values, 0.25, mask, None), wanted)
    added = mx.where(ragged(3, True), 0.5, -1e9)
    wanted = stock_attention(queries, keys, values, 0.25, added, None)
    assert mx.array_equal(grouped_attention(queries, keys, values, 0.25, added, None), wanted)
    sinks = mx.array(np.linspace(-1, 1, 6, dtype=np.float32))
    wanted = stock_attention(queries, keys, values, 0.25, ragged(3, True), sinks)
    assert mx.array_equal(grouped_attention(queries, keys, values, 0.25, ragged(3, True), sinks), wanted)


@pytest.mark.parametrize("kind", ["all", "causal", "array"])
@pytest.mark.parametrize("width", [2, 3, FEW_QUERIES, FEW_ON_CUDA])
@pytest.mark.parametrize("heads", HEADS)
def test_products_for_few_queries_are_the_stock_attention(
    heads: tuple[int, int], width: int, kind: str
) -> None:
    queries, keys, values = arrays(heads, width, 16)
    mask = {"all": None, "causal": "causal", "array": mx.arange(ROOM) % 3 != mx.arange(width)[:, None] % 3}[
        kind
    ]
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
    got = few_queries(queries, keys, values, 0.25, mask)
    assert got is not None
    assert_close(got, wanted)


def test_masks_of_numbers_are_left_to_mlx() -> None:
    queries, keys, values = arrays((6, 2), 3, 16)
    assert few_queries(queries, keys, values, 0.25, mx.zeros((3, ROOM))) is None
