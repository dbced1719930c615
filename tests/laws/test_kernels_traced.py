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
from mlx_dspark.engine.handover import settle
from mlx_dspark.kernels.framework.plan import Admitted, RowPlan, Switchboard
from mlx_dspark.kernels.gpu_modules import KernelLinear, joined, planned
from mlx_dspark.kernels.traced import MOST_ROWS, Traced, traceable
from tests.laws.test_kernels_together import Together
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


@pytest.mark.parametrize("name", ["weight", "scales", "biases"])
@pytest.mark.parametrize("change", ["replaced", "in place", "updated"])
def test_weights_that_change_are_used(name: str, change: str) -> None:
    plainly, traced, _, _ = both(tiny_llama)
    stock, tokens = quantized(tiny_llama), tokens_of(4)
    before = traced(tokens)
    for model in (plainly, traced, stock):
        part = model.layers[0].mlp.down_proj
        by = mx.array(2, part[name].dtype)
        if change == "replaced":
            part[name] = part[name] * by
        elif change == "in place":
            part[name] *= by
        else:
            model.update({"model": {"layers": [{"mlp": {"down_proj": {name: part[name] * by}}}]}})
    for model in (plainly, traced):
        assert mx.allclose(stock(tokens), model(tokens), atol=1e-4)
    assert not mx.array_equal(before, traced(tokens))


class Wrapped(nn.Module):
    """As adapters wrap a linear module."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.more = mx.array(0.0)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + self.more


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_parts_that_are_replaced_are_used(name: str) -> None:
    plainly, traced, _, _ = both(tiny_llama)
    tokens = tokens_of(4)
    traced(tokens)
    for model in (plainly, traced):
        forward = model.layers[0].mlp
        forward[name] = Wrapped(forward[name])
    for more in (0.0, 1.0):
        for model in (plainly, traced):
            model.layers[0].mlp[name].more = mx.array(more)
        assert mx.array_equal(plainly(tokens), traced(tokens)), more
    for model in (plainly, traced):
        forward = model.layers[0].mlp
        forward[name] = planned(quantized(tiny_llama).layers[0].mlp[name], forward[name].linear.plan)
    assert mx.array_equal(plainly(tokens), traced(tokens))


def test_after_tracing_a_model_can_go_to_another_thread() -> None:
    plainly, traced, _, _ = both(tiny_llama)
    mx.eval(traced(tokens_of(4)))
    settle(traced)
    for model in (plainly, traced):
        model.layers[0].mlp.down_proj.scales *= 2
    settle(plainly, traced)
    assert mx.array_equal(plainly(tokens_of(17)), traced(tokens_of(17)))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_where_tracing_fails_all_is_what_it_was(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernel = Together(widths=WIDTHS)
    plainly, traced, _, _ = both(tiny_llama, kernel)
    ours, call = traced.layers[0].mlp[name], KernelLinear.__call__

    def weights() -> list[mx.array]:
        return [part[held] for each in forwards(traced) for part in each.values() for held in sorted(part)]

    def fails(self: KernelLinear, x: mx.array) -> mx.array:
        if self is ours:
            raise ValueError("it fails")
        return call(self, x)

    tokens, before = tokens_of(4), weights()
    with monkeypatch.context() as patch:
        patch.setattr(KernelLinear, "__call__", fails)
        with pytest.raises(ValueError, match="it fails"):
            traced(tokens)
    assert all(a is b for a, b in zip(before, weights(), strict=True))
    settle(traced)
    launched = len(kernel.launches)
    assert mx.array_equal(plainly(tokens), traced(tokens))
    assert len(kernel.launches) - launched == 2 * len(traced.layers), "and products are still joined"


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


def test_a_switchboard_that_is_kept_keeps_no_weights() -> None:
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    *models, board, _ = both(tiny_llama)
    mx.eval([model(tokens_of(3)) for model in models])
    weights = mx.get_active_memory() - held
    models.clear()
    gc.collect()
    assert mx.get_active_memory() - held < weights / 100
    board.switch_off("doubled", "it is slow")


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


def test_a_trace_is_made_anew_for_other_parts() -> None:
    trace, made = Traced(), []

    def make() -> Any:
        made.append(len(made))
        return lambda x, arrays: x + 1

    part, other = nn.Module(), nn.Module()
    for each in (part, part, other):
        assert trace.run([each], make)(mx.array(1.0), []).item() == 2
    trace.forget()
    trace.run([other], make)
    assert made == [0, 1, 2]
