"""The six laws of layer states (`state/base.py`), for every kind, with rows of different keep counts.

A new kind joins by an entry in KINDS: how to make one, what a position's input is, how to feed it, and how to
read what a row holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask

from mlx_dspark.kernels.attention import RowArrays, grouped, rowwise, stock_attention
from mlx_dspark.state.base import Span
from mlx_dspark.state.kv import STEP, KVState
from mlx_dspark.state.layout import MOST, Forms, Layout
from mlx_dspark.state.quantized import GROUP, QuantizedKVState
from mlx_dspark.state.rectangle import RectangleKV
from mlx_dspark.state.recurrent import RecurrentState
from mlx_dspark.state.rows import RowStates
from mlx_dspark.state.window import ROOM, WindowState
from tests import tiny_mixers

HEADS, DIM = 2, 4


@dataclass(frozen=True)
class Kind:
    """`feed(state, inputs [rows, width])` writes inside an open transaction; `held(state, row, depth)`
    reads. `rounded`: what is held depends in its last bits on the widths it was fed in. `layout`: rows take
    the form that it says."""

    new: Callable[[int], Any]
    feed: Callable[[Any, list[list[int]]], None]
    held: Callable[[Any, int, int], list[mx.array]]
    rounded: bool = False
    layout: Layout | None = None


def _kv_inputs(inputs: list[list[int]]) -> tuple[mx.array, mx.array]:
    base = mx.array(inputs, dtype=mx.float32)[:, None, :, None]
    keys = base + mx.arange(HEADS)[None, :, None, None] / 8 + mx.arange(DIM) / 64
    return keys, -2 * keys


def _kv_held(state: Any, row: int, depth: int) -> list[mx.array]:
    return list(state.capture(row, depth).arrays)


def _recurrent(mixer: str) -> Kind:
    return Kind(RecurrentState, partial(tiny_mixers.feed, mixer), _kv_held, rounded=True)


WINDOW = 6


def _quantized(bits: int) -> Kind:
    def feed(state: QuantizedKVState, inputs: list[list[int]]) -> None:
        keys = mx.repeat(_kv_inputs(inputs)[0], GROUP // DIM, axis=-1) + mx.sin(mx.arange(GROUP))
        state.update_and_fetch(keys, -2 * keys)

    return Kind(new=lambda rows: QuantizedKVState(rows, bits=bits), feed=feed, held=_kv_held)


def _window(slack: int) -> Kind:
    """A window holds what its next position sees; how far back it reaches besides is free."""

    def held(state: WindowState, row: int, depth: int) -> list[mx.array]:
        return [a[..., 1 - WINDOW :, :] for a in state.capture(row, depth).arrays]

    return Kind(
        new=lambda rows: WindowState(rows, window=WINDOW, slack=slack),
        feed=lambda state, inputs: state.update_and_fetch(*_kv_inputs(inputs)) and None,
        held=held,
    )


KINDS = {
    "kv": Kind(
        new=KVState,
        feed=lambda state, inputs: state.update_and_fetch(*_kv_inputs(inputs)) and None,
        held=_kv_held,
    ),
    "kv rectangle": Kind(
        new=RectangleKV,
        feed=lambda state, inputs: state.update_and_fetch(*_kv_inputs(inputs)) and None,
        held=_kv_held,
    ),
    "kv in company": Kind(
        new=KVState,
        feed=lambda state, inputs: state.update_and_fetch(*_kv_inputs(inputs)) and None,
        held=_kv_held,
        layout=Layout.COMPANY,
    ),
    "kv in 8 bits": _quantized(8),
    "kv in 4 bits": _quantized(4),
    "window": _window(3),
    "window without slack": _window(0),
    "short conv": _recurrent("short conv"),
    "gated delta": _recurrent("gated delta"),
    "gated delta, replayed": _recurrent("gated delta, replayed"),
    "mamba2": _recurrent("mamba2"),
    "mamba, run again": Kind(
        lambda rows: RecurrentState(rows, slots=2), tiny_mixers.feed_again, _kv_held, rounded=True
    ),
    "gated delta, row by row": Kind(
        RecurrentState, partial(tiny_mixers.feed_alone, "gated delta"), _kv_held, rounded=True
    ),
}

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
counter = iter(range(10**9))


def fresh(rows: int, width: int) -> list[list[int]]:
    return [[next(counter) for _ in range(width)] for _ in range(rows)]


def run(kind: Kind, states: RowStates, inputs: list[list[int]], keep: list[int]) -> None:
    with states.transaction(len(inputs[0])) as transaction:
        for layer in states.layers:
            kind.feed(layer, inputs)
        transaction.commit(keep)


def in_rectangle(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
) -> mx.array:
    assert sinks is None
    return grouped(queries, keys, values, scale, mask)


def new(kind: Kind, rows: int, layers: int = 2) -> RowStates:
    forms = kind.layout and Forms(kind.layout.padded, stock_attention, in_rectangle)
    return RowStates([kind.new(rows) for _ in range(layers)], rows, forms=forms)


def same(kind: Kind, a: RowStates, b: RowStates, rows: list[tuple[int, int]] | None = None) -> bool:
    """Whether rows of `a` hold what rows of `b` hold; by default all, index by index."""
    pairs = rows if rows is not None else [(r, r) for r in range(len(a))]
    assert pairs
    for mine, theirs in zip(a.layers, b.layers, strict=True):
        for r, s in pairs:
            if a.depth[r] != b.depth[s]:
                return False
            left, right = kind.held(mine, r, a.depth[r]), kind.held(theirs, s, b.depth[s])
            if len(left) != len(right):
                return False
            equal = _close if kind.rounded else mx.array_equal
            if not all(equal(x, y).item() for x, y in zip(left, right, strict=True)):
                return False
    return True


def _close(a: mx.array, b: mx.array) -> mx.array:
    return mx.allclose(a, b, rtol=1e-5, atol=1e-5)


def grown(kind: Kind, rows: int, depth: int) -> tuple[RowStates, list[list[int]]]:
    states, inputs = new(kind, rows), fresh(rows, depth)
    run(kind, states, inputs, [depth] * rows)
    return states, inputs


@kinds
@pytest.mark.parametrize("keep", [[0, 0, 0], [1, 3, 5], [5, 0, 2], [5, 5, 5]])
@pytest.mark.parametrize("depth", [1, 7, STEP - 2, STEP])
def test_law_1_committing_k_of_w_equals_feeding_k(kind: Kind, keep: list[int], depth: int) -> None:
    states, begun = grown(kind, 3, depth)
    block = fresh(3, 5)
    run(kind, states, block, keep)
    for row, kept in enumerate(keep):
        alone = new(kind, 1)
        run(kind, alone, [begun[row]], [depth])
        if kept:
            run(kind, alone, [block[row][:kept]], [kept])
        assert same(kind, states, alone, [(row, 0)])


@kinds
def test_law_2_committing_nothing_equals_nothing(kind: Kind) -> None:
    states, begun = grown(kind, 2, 6)
    twin = new(kind, 2)
    run(kind, twin, begun, [6, 6])
    for width in (1, 4, 40):
        run(kind, states, fresh(2, width), [0, 0])
        with states.transaction(width):
            for layer in states.layers:
                kind.feed(layer, fresh(2, width))
        assert same(kind, states, twin)
    more = fresh(2, 3)
    run(kind, states, more, [3, 3])
    run(kind, twin, more, [3, 3])
    assert same(kind, states, twin)


@kinds
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_laws_3_and_4_commits_compose_and_rows_stay_apart(kind: Kind, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    states = new(kind, rows)
    kept: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 9))
        keep = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
        block = fresh(rows, width)
        run(kind, states, block, keep)
        for row in range(rows):
            kept[row] += block[row][: keep[row]]
    for row, tokens in enumerate(kept):
        assert states.depth[row] == len(tokens)
        alone = new(kind, 1)
        if tokens:
            run(kind, alone, [tokens], [len(tokens)])
        assert same(kind, states, alone, [(row, 0)])


@kinds
def test_law_5_a_capture_is_unmoved_by_later_writes(kind: Kind) -> None:
    for depth in (3, STEP):
        states, _ = grown(kind, 2, depth)
        capture = states.capture(1)
        before = [mx.array(array) for layer in capture.layers for array in layer.arrays]
        mx.eval(before)
        run(kind, states, fresh(2, 2), [0, 0])
        run(kind, states, fresh(2, 3), [3, 2])
        mx.eval(states.arrays())
        after = [array for layer in capture.layers for array in layer.arrays]
        assert before
        assert all(mx.array_equal(x, y).item() for x, y in zip(before, after, strict=True))
        assert capture.nbytes == sum(array.nbytes for array in after) > 0
        restored = new(kind, 1)
        restored.restore(0, capture)
        run(kind, restored, fresh(1, 4), [4])
        assert all(mx.array_equal(x, y).item() for x, y in zip(before, after, strict=True))


@kinds
def test_law_6_join_select_capture_and_restore_invert_each_other(kind: Kind) -> None:
    left, left_inputs = grown(kind, 2, 4)
    right, right_inputs = grown(kind, 1, 9)
    twins = [new(kind, 1) for _ in range(3)]
    for twin, inputs in zip(twins, [*left_inputs, *right_inputs], strict=True):
        run(kind, twin, [inputs], [len(inputs)])
    left.join(right)
    assert left.depth == [4, 4, 9]
    for row, twin in enumerate(twins):
        assert same(kind, left, twin, [(row, 0)])
    left.select([2, 0])
    assert left.depth == [9, 4]
    assert same(kind, left, twins[2], [(0, 0)])
    assert same(kind, left, twins[0], [(1, 0)])
    restored = new(kind, 1)
    restored.restore(0, left.capture(0))
    assert same(kind, restored, twins[2], [(0, 0)])
    more = fresh(1, 3)
    run(kind, restored, more, [2])
    run(kind, twins[2], more, [2])
    assert same(kind, restored, twins[2], [(0, 0)])


@kinds
@pytest.mark.parametrize("depths", [(4, 9), (9, 4), (STEP, 3), (3, STEP + 1), (0, 5), (5, 0)])
def test_law_6_newcomers_take_the_places_of_rows_that_leave(kind: Kind, depths: tuple[int, int]) -> None:
    old, old_inputs = new(kind, 3), fresh(3, depths[0])
    young, young_inputs = new(kind, 2), fresh(2, depths[1])
    for states, inputs in ((old, old_inputs), (young, young_inputs)):
        if inputs[0]:
            run(kind, states, inputs, [len(inputs[0])] * len(inputs))
    old.replace([2, 0], young)
    whole = [young_inputs[1], old_inputs[1], young_inputs[0]]
    more = fresh(3, 2)
    run(kind, old, more, [2, 1, 0])
    for row, (inputs, kept) in enumerate(zip(whole, (2, 1, 0), strict=True)):
        alone = new(kind, 1)
        for block in (inputs, more[row][:kept]):
            if block:
                run(kind, alone, [block], [len(block)])
        assert same(kind, old, alone, [(row, 0)])


@kinds
def test_a_capture_restores_at_every_depth_that_it_names(kind: Kind) -> None:
    states, inputs = grown(kind, 1, 7)
    capture = states.capture(0)
    for wish in range(9):
        depth = states.rewindable(capture, wish)
        assert depth <= min(wish, 7)
        restored = new(kind, 1)
        restored.restore(0, capture, depth)
        twin = new(kind, 1)
        if depth:
            run(kind, twin, [inputs[0][:depth]], [depth])
        assert same(kind, restored, twin)


@kinds
def test_two_rounds_in_flight_equal_two_rounds_in_turn(kind: Kind) -> None:
    states, begun = grown(kind, 2, 3)
    twin = new(kind, 2)
    run(kind, twin, begun, [3, 3])
    first, second = fresh(2, 1), fresh(2, 1)
    one = states.begin(1)
    for layer in states.layers:
        kind.feed(layer, first)
    two = states.begin(1)
    for layer in states.layers:
        kind.feed(layer, second)
    one.commit([1, 1])
    two.commit([1, 0])
    run(kind, twin, first, [1, 1])
    run(kind, twin, second, [1, 0])
    assert same(kind, states, twin)


@kinds
def test_a_row_that_the_first_round_cut_keeps_nothing_of_the_second(kind: Kind) -> None:
    states, begun = grown(kind, 3, 3)
    twin, rounds = new(kind, 3), [fresh(3, 3), fresh(3, 3)]
    run(kind, twin, begun, [3, 3, 3])
    transactions = []
    for inputs in rounds:
        transactions.append(states.begin(3))
        for layer in states.layers:
            kind.feed(layer, inputs)
    for transaction, inputs, keep in zip(transactions, rounds, ([3, 1, 3], [2, 0, 3]), strict=True):
        transaction.commit(keep)
        run(kind, twin, inputs, keep)
    assert same(kind, states, twin)


@kinds
@pytest.mark.parametrize("kept", [[0, 3, 5], [5, 5, 5], [2, 2, 2], [0, 0, 0]])
def test_many_rounds_in_flight_keep_what_they_begin_with(kind: Kind, kept: list[int]) -> None:
    states, begun = grown(kind, 3, STEP - 2)
    twin, rounds = new(kind, 3), [fresh(3, 1) for _ in range(5)]
    run(kind, twin, begun, [STEP - 2] * 3)
    states.most_open = len(rounds)
    transactions = []
    for inputs in rounds:
        transactions.append(states.begin(1))
        for layer in states.layers:
            kind.feed(layer, inputs)
    for i, (transaction, inputs) in enumerate(zip(transactions, rounds, strict=True)):
        keep = [int(count > i) for count in kept]
        transaction.commit(keep)
        run(kind, twin, inputs, keep)
    assert same(kind, states, twin)
    again = fresh(3, 2)
    for each in (states, twin):
        run(kind, each, again, [2, 1, 2])
    assert same(kind, states, twin)


@kinds
def test_rolling_back_the_first_round_in_flight_drops_both(kind: Kind) -> None:
    states, begun = grown(kind, 2, 3)
    twin = new(kind, 2)
    run(kind, twin, begun, [3, 3])
    one = states.begin(1)
    for layer in states.layers:
        kind.feed(layer, fresh(2, 1))
    two = states.begin(1)
    one.rollback()
    assert not one.open
    assert not two.open
    assert same(kind, states, twin)


@kinds
def test_misuse_is_caught(kind: Kind) -> None:
    states, _ = grown(kind, 1, 3)
    one = states.begin(2)
    for layer in states.layers:
        kind.feed(layer, fresh(1, 2))
    two = states.begin(1)
    with pytest.raises(AssertionError, match="first in, first out"):
        two.commit([1])
    with pytest.raises(AssertionError, match="2 rounds"):
        states.begin(1)
    one.commit([1])
    with pytest.raises(AssertionError, match="voided"):
        two.commit([1])
    two.commit([0])
    assert states.depth == [4]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_rows_that_come_and_go_hold_what_rows_apart_hold_in_little_more_room(data: st.DataObject) -> None:
    """A row alone lies by itself, others in a rectangle, unless that is padding for the most part."""
    depths = st.integers(0, 6) | st.integers(STEP - 2, STEP + 2) | st.just(4 * STEP)
    kind, apart = KINDS["kv in company"], KINDS["kv"]
    states, twin = new(kind, 1, 1), new(apart, 1, 1)
    for _ in range(data.draw(st.integers(1, 4))):
        n, depth = data.draw(st.integers(1, 3)), data.draw(depths)
        comers, twins, inputs = new(kind, n, 1), new(apart, n, 1), fresh(n, depth)
        for which, those in ((kind, comers), (apart, twins)):
            if depth:
                run(which, those, inputs, [depth] * n)
        how = data.draw(st.sampled_from(["join", "join and leave", "replace"][: 2 + (n <= len(states))]))
        order = data.draw(st.permutations(range(len(states) + n * (how != "replace"))))
        for each, those in ((states, comers), (twin, twins)):
            if how == "replace":
                each.replace(order[:n], those)
                continue
            each.join(those)
            if how == "join and leave":
                each.select(order[len(order) // 2 :])
        assert same(kind, states, twin)
        room = sum(array.nbytes for array in twin.arrays())
        assert how == "replace" or sum(array.nbytes for array in states.arrays()) <= MOST * room
        assert states.padded is Layout.COMPANY.padded(states.depth)
        assert states.padded or len(states) == 1 or len(states) > MOST
        block = fresh(len(states), 3)
        keep = data.draw(st.lists(st.integers(0, 3), min_size=len(states), max_size=len(states)))
        run(kind, states, block, keep)
        run(apart, twin, block, keep)
        assert same(kind, states, twin)
        layer: Any = states.layers[0]
        assert layer.attention is (in_rectangle if states.padded else stock_attention)


def test_a_rectangle_that_has_become_padding_is_parted() -> None:
    kind = KINDS["kv in company"]
    (states, begun), twin, block = grown(kind, 3, 4), new(KINDS["kv"], 3), fresh(3, 4 * STEP)
    run(kind, states, block, [4 * STEP, 1, 0])
    assert states.padded
    for inputs, keep in ((begun, [4] * 3), (block, [4 * STEP, 1, 0])):
        run(KINDS["kv"], twin, inputs, keep)
    more = fresh(3, 2)
    run(kind, states, more, [2, 1, 0])
    run(KINDS["kv"], twin, more, [2, 1, 0])
    assert not states.padded
    assert same(kind, states, twin)


def test_restored_rows_take_the_form_that_suits_them_in_their_first_round() -> None:
    kind = KINDS["kv in company"]
    states, inputs = grown(kind, 2, 7)
    captures, restored, twin = [states.capture(row) for row in range(2)], new(kind, 2), new(KINDS["kv"], 2)
    run(KINDS["kv"], twin, inputs, [7, 7])
    for row, capture in enumerate(captures):
        restored.restore(row, capture)
    more = fresh(2, 2)
    run(kind, restored, more, [2, 1])
    run(KINDS["kv"], twin, more, [2, 1])
    assert restored.padded
    assert same(kind, restored, twin)


def test_a_rectangle_whose_deepest_row_left_holds_room_for_the_others() -> None:
    kind = KINDS["kv in company"]
    (states, _), (shallow, inputs) = grown(kind, 1, 3 * STEP), grown(kind, 2, 4)
    states.join(shallow)
    assert states.padded
    states.select([2, 1])
    assert states.padded
    assert [array.shape[2] for array in states.arrays()] == [STEP] * 4
    twin = new(KINDS["kv"], 2)
    run(KINDS["kv"], twin, inputs[::-1], [4, 4])
    assert same(kind, states, twin)


@pytest.mark.parametrize("change", ["join", "leave", "join in a rectangle", "leave for a list"])
def test_rows_that_come_and_go_hold_one_layer_twice_at_most(change: str) -> None:
    kind, layers, depth = KINDS["kv in company"], 16, 8 * STEP
    states, first, other = (new(kind, rows, layers) for rows in (3 if "leave" in change else 1, 1, 1))
    for each in (states, first, other):
        run(kind, each, fresh(len(each), depth), [depth] * len(each))
        mx.eval(each.arrays())
    if change == "join in a rectangle":
        states.join(first)
    del first
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    if "join" in change:
        states.join(other)
    else:
        states.select([1] if "list" in change else [2, 0])
    layer = sum(array.nbytes for array in states.arrays()) // layers
    assert mx.get_peak_memory() - held <= 2 * layer


def test_one_row_hands_model_code_plain_arrays_and_several_hand_it_rows() -> None:
    alone, together = KVState(1), KVState(2)
    alone.begin(Span([0], 2))
    together.begin(Span([0, 0], 2))
    keys, values = _kv_inputs(fresh(2, 2))
    assert isinstance(alone.update_and_fetch(keys[:1], values[:1])[0], mx.array)
    assert isinstance(together.update_and_fetch(keys, values)[0], RowArrays)
    assert alone.offset == 0
    assert together.offset.tolist() == [0, 0]


@pytest.mark.parametrize("depths", [[0], [5], [6], [7], [ROOM + 9], [0, 3], [5, 6, 40], [2 * ROOM, ROOM - 3]])
@pytest.mark.parametrize("width", [1, 2, WINDOW, WINDOW + 1, ROOM + 30])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_of_a_window_attend_as_whole_texts_under_its_mask_do(
    depths: list[int], width: int, with_sinks: bool
) -> None:
    length = max(depths) + max(width, 13)
    shape, key = (len(depths), HEADS, length, DIM), mx.random.key(width)
    queries, keys, values = (mx.random.normal(shape, key=k) for k in mx.random.split(key, 3))
    sinks = mx.array([0.5, -1.0]) if with_sinks else None
    state = WindowState(len(depths), window=WINDOW, slack=2)
    states = RowStates([state], len(depths))
    attend = rowwise(mx.fast.scaled_dot_product_attention)

    def fed(begin: list[int], width: int) -> mx.array:
        part = [slice(b, b + width) for b in begin]
        q, k, v = (mx.stack([a[r, :, s] for r, s in enumerate(part)]) for a in (queries, keys, values))
        mask = state.make_mask(width)
        return attend(q, *state.update_and_fetch(k, v), cache=state, scale=0.5, mask=mask, sinks=sinks)

    for _ in range(-(-max(depths) // 9)):
        with states.transaction(13) as transaction:
            fed(states.depth, 13)
            transaction.commit(
                [min(9, depth - done) for depth, done in zip(depths, states.depth, strict=True)]
            )
    with states.transaction(width):
        out = fed(depths, width)
    for row, depth in enumerate(depths):
        seen, mask = slice(0, depth + width), create_causal_mask(width, depth, window_size=WINDOW)
        q, k, v = queries[row : row + 1, :, depth:], keys[row : row + 1], values[row : row + 1]
        whole = stock_attention(q[:, :, :width], k[:, :, seen], v[:, :, seen], 0.5, mask, sinks)
        assert mx.allclose(out[row : row + 1], whole, rtol=1e-5, atol=1e-5).item()


@pytest.mark.parametrize("kept", [1, ROOM // 2, ROOM + 44])
def test_a_window_that_moves_on_in_a_second_round_in_flight_can_still_go_back(kept: int) -> None:
    kind, width = KINDS["window without slack"], ROOM + 44
    states, begun = grown(kind, 2, 9)
    twin = new(kind, 2)
    run(kind, twin, begun, [9, 9])
    first, second = fresh(2, width), fresh(2, ROOM)
    one = states.begin(width)
    for layer in states.layers:
        kind.feed(layer, first)
    two = states.begin(ROOM)
    for layer in states.layers:
        kind.feed(layer, second)
    one.commit([kept, width])
    two.commit([0, 7])
    run(kind, twin, first, [kept, width])
    run(kind, twin, second, [0, 7])
    assert same(kind, states, twin)
