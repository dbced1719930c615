"""Laws of attention as products of grouped heads, which is CUDA's for few queries: it is MLX's attention."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.kernels import attention
from mlx_dspark.kernels.attention import FEW_QUERIES, grouped, stock_attention

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


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that CUDA has, on this device; lists the calls of products."""
    calls: list[str] = []

    def counted(*given: Any) -> mx.array:
        calls.append("grouped")
        return grouped(*given)

    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "grouped", counted)
    return calls


@pytest.mark.parametrize("holes", [False, True], ids=["causal", "holes"])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("width", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("heads", HEADS)
def test_products_under_a_mask_of_each_row_are_mlx_s_attention(
    heads: tuple[int, int], width: int, dim: int, holes: bool, on_cuda: list[str]
) -> None:
    queries, keys, values = arrays(heads, width, dim)
    mask = ragged(width, holes)
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=dim**-0.5, mask=mask)
    assert_close(stock_attention(queries, keys, values, dim**-0.5, mask, None), wanted)
    assert on_cuda


@pytest.mark.parametrize("kind", ["all", "causal", "array"])
@pytest.mark.parametrize("width", [1, 2, 3, 8, FEW_QUERIES, FEW_QUERIES + 1])
@pytest.mark.parametrize("heads", HEADS)
def test_products_for_few_queries_are_mlx_s_attention(
    heads: tuple[int, int], width: int, kind: str, on_cuda: list[str]
) -> None:
    queries, keys, values = arrays(heads, width, 16)
    array = mx.arange(ROOM) % 3 != mx.arange(width)[:, None] % 3
    mask = {"all": None, "causal": "causal", "array": array}[kind]
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
    assert_close(stock_attention(queries, keys, values, 0.25, mask, None), wanted)
    assert bool(on_cuda) == (width <= FEW_QUERIES and (width > 1 or kind == "array"))


@pytest.mark.parametrize("heads", HEADS)
def test_hidden_keys_and_values_do_not_count(heads: tuple[int, int]) -> None:
    """What lies in the buffer past a row's depth, of any finite size, changes nothing."""
    queries, keys, values = arrays(heads, 3, 16)
    beyond = mx.arange(ROOM)[None, None, :, None] >= mx.array(DEPTHS)[:, None, None, None]
    mask = ragged(3, False)
    results = []
    for filler in (0.0, 1e4):
        filled_keys, filled_values = (mx.where(beyond, filler, each) for each in (keys, values))
        results.append(grouped(queries, filled_keys, filled_values, 0.25, mask))
    assert mx.array_equal(*results)


@pytest.mark.parametrize("width", [1, 3])
def test_masks_of_numbers_and_sinks_are_left_to_mlx(width: int, on_cuda: list[str]) -> None:
    queries, keys, values = arrays((6, 2), width, 16)
    added = mx.where(ragged(width, True), 0.5, -1e9)
    sinks = mx.array(np.linspace(-1, 1, 6, dtype=np.float32))
    for mask, given in ((added, None), (ragged(width, True), sinks), ("causal", sinks), (None, sinks)):
        wanted = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=0.25, mask=mask, sinks=given
        )
        assert mx.array_equal(stock_attention(queries, keys, values, 0.25, mask, given), wanted)
    assert not on_cuda


@pytest.mark.parametrize("width", [1, 2, 8])
def test_elsewhere_attention_is_mlx_s_own(width: int) -> None:
    queries, keys, values = arrays((6, 2), width, 16)
    for mask in (None, "causal", ragged(width, True)):
        wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
        assert mx.array_equal(stock_attention(queries, keys, values, 0.25, mask, None), wanted)
