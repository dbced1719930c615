"""Laws of feed-forwards that are traced: what comes out is what their modules give, whatever changes."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten

from benchmarks.sides import Sides
from mlx_dspark.kernels.framework.plan import Admitted, RowPlan, Switchboard
from mlx_dspark.kernels.gpu_modules import joined, planned
from mlx_dspark.kernels.traced import MOST_ROWS, Traced, traceable
from tests.scripted_kernels import Doubled
from tests.tiny import tiny_family, tiny_llama, tiny_qwen3

FAMILIES = pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, partial(tiny_family, "gemma3_text")])
WIDTHS = (1, 2, 4, 8, 12, 16)


def place(model: nn.Module, kernel: Doubled, board: Switchboard) -> None:
    """Plan every quantized linear module."""
    plan = RowPlan([Admitted(kernel, WIDTHS, dict.fromkeys(WIDTHS, ("laid", 1)))], mx.float32, board)
    found = [(n, planned(m, plan)) for n, m in model.named_modules() if type(m) is nn.QuantizedLinear]
    model.update_modules(tree_unflatten(found))


def quantized(make: Any) -> Any:
    model = make()
    nn.quantize(model, 32, 4)
    return model


def both(make: Any, kernel: Doubled | None = None) -> tuple[Any, Any, Switchboard, Doubled]:
    """A model on a kernel and the same traced, after forwards that show who shares an x; what they use."""
    kernel, board = kernel or Doubled(), Switchboard()
    plainly, traced = quantized(make), quantized(make)
    place(plainly, kernel, Switchboard())
    place(traced, kernel, board)
    joined(traced)
    tokens = mx.array([[3, 4, 5]])
    for _ in range(2):
        assert mx.array_equal(plainly(tokens), traced(tokens))
    return plainly, traced, board, kernel


def forwards(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "traced")]


def tokens_of(width: int, rows: int = 1) -> mx.array:
    return (mx.arange(rows * width) % 60).reshape(rows, width) + 2


@FAMILIES
def test_a_traced_model_computes_the_same_bits(make: Any) -> None:
    plainly, traced, _, _ = both(make)
    assert len(forwards(traced)) == len(traced.layers)
    assert not forwards(plainly)
    for rows, width in [(1, 1), (1, 5), (2, 3), (1, MOST_ROWS), (1, MOST_ROWS + 1), (4, 5), (1, 5), (1, 1)]:
        tokens = tokens_of(width, rows)
        assert mx.array_equal(plainly(tokens), traced(tokens)), (rows, width)


@FAMILIES
def test_one_number_of_rows_is_traced_once_and_many_never(make: Any) -> None:
    _, traced, _, kernel = both(make)
    parts = {id(part) for forward in forwards(traced) for part in forward.values()}
    assert len(parts) == 3 * len(traced.layers)

    def multiplied(width: int) -> int:
        before = len(kernel.rows)
        mx.eval(traced(tokens_of(width)))
        return len(kernel.rows) - before

    first, again = multiplied(4), multiplied(4)
    assert first - again == len(parts)
    assert multiplied(5) == first
    assert multiplied(5) == again
    assert multiplied(MOST_ROWS + 1) == 0


def test_weights_that_are_replaced_are_used() -> None:
    plainly, traced, _, _ = both(tiny_llama)
    tokens = tokens_of(4)
    before = traced(tokens)
    for name in ("scales", "biases"):
        for model in (plainly, traced):
            part = model.layers[0].mlp.down_proj
            part[name] = part[name] * 1.5
        assert mx.array_equal(plainly(tokens), traced(tokens)), name
        assert not mx.array_equal(before, traced(tokens)), name


def test_a_kernel_that_is_switched_off_is_not_used() -> None:
    kernel = Doubled(adding=0.25)
    plainly, traced, board, _ = both(tiny_llama, kernel)
    tokens = tokens_of(4)
    assert mx.array_equal(plainly(tokens), traced(tokens))
    board.switch_off(kernel.name, "it is slow")
    assert mx.array_equal(quantized(tiny_llama)(tokens), traced(tokens))


def test_each_thread_has_a_trace_of_its_own() -> None:
    plainly, traced, _, _ = both(tiny_llama)

    def logits(width: int) -> list[float]:
        return traced(tokens_of(width))[0, -1].tolist()

    wanted = [plainly(tokens_of(width))[0, -1].tolist() for width in (2, 3, 2)]
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            assert list(pool.map(logits, (2, 3, 2))) == wanted
    assert [logits(width) for width in (2, 3, 2)] == wanted


def test_a_model_that_is_gone_takes_its_traces_along() -> None:
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    with ThreadPoolExecutor(1) as pool:
        models = list(both(tiny_llama)[:2])
        for width in (1, 2, 3):
            pool.submit(lambda width=width: mx.eval(models[1](tokens_of(width)))).result()
            mx.eval(models[1](tokens_of(width)))
        assert mx.get_active_memory() > held
        models.clear()
        gc.collect()
        assert mx.get_active_memory() <= held, "while both threads go on"


def test_sides_take_turns_with_what_is_traced() -> None:
    plainly = quantized(tiny_llama)
    model, kernel, tokens = quantized(tiny_llama), Doubled(adding=0.25), tokens_of(3)

    def put(model: nn.Module) -> None:
        place(model, kernel, Switchboard())
        joined(model)

    sides = Sides(model, put)
    ours = model(tokens)
    for _ in range(2):
        sides.use_stock()
        assert not forwards(model)
        assert mx.array_equal(plainly(tokens), model(tokens))
        sides.use_ours()
        assert forwards(model)
        assert mx.array_equal(ours, model(tokens))


def test_only_feed_forwards_of_mlx_lm_with_three_planned_parts_are_traced() -> None:
    model = quantized(tiny_llama)
    forward = model.layers[0].mlp
    assert not traceable(forward), "its parts are not planned"
    place(model, Doubled(), Switchboard())
    assert traceable(forward)
    assert not traceable(model.layers[0].self_attn)

    class Other(type(forward)):
        """Of another module than mlx-lm's."""

    forward.__class__ = Other
    assert not traceable(forward)


def test_a_trace_is_made_anew_for_other_arrays() -> None:
    trace, made = Traced(), []

    def make() -> Any:
        made.append(len(made))
        return lambda x: x + 1

    part = {"weight": mx.zeros(2), "scales": mx.zeros(2)}
    for _ in range(2):
        assert trace.run([part], make)(mx.array(1.0)).item() == 2
    part["biases"] = mx.zeros(2)
    trace.run([part], make)
    trace.forget()
    trace.run([part], make)
    assert made == [0, 1, 2]
