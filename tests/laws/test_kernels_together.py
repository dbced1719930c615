"""Laws of products by one launch: each is what it is by itself, whoever is asked, and in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.kernel import TogetherKernel
from mlx_dspark.kernels.framework.plan import Admitted, RowPlan, Switchboard
from mlx_dspark.kernels.gpu_modules import KernelLinear, joined, planned
from tests.scripted_kernels import Doubled
from tests.tiny import tiny_llama, tiny_qwen3

GEOMETRIES = {2: ("laid", 2), 4: ("laid", 4)}
SERVED = (2, 3, 4)


@dataclass
class Together(Doubled):
    """Multiplies with several matrices at once, and counts how many those were."""

    most_together: int = 3
    launches: list[int] = field(default_factory=list)
    laid: list[Any] = field(default_factory=list)

    def multiply_together(self, x: mx.array, sources: Sequence[Source], geometry: Any) -> list[mx.array]:
        self.launches.append(len(sources))
        self.laid.append((geometry, [source.outputs for source in sources]))
        return [self.multiply(x, source, geometry) for source in sources]


def plan_of(kernel: Doubled, board: Switchboard, dtype: mx.Dtype = mx.float32) -> RowPlan:
    return RowPlan([Admitted(kernel, (2, 4), GEOMETRIES)], dtype, board)


def placed(model: nn.Module, kernel: Doubled, *, together: bool = True) -> Switchboard:
    """Plan every quantized linear module of the model."""
    board = Switchboard()
    plan = plan_of(kernel, board)
    for parent in model.modules():
        for name, child in list(parent.items()):
            if type(child) is nn.QuantizedLinear:
                setattr(parent, name, planned(child, plan))
    if together:
        joined(model)
    return board


def quantized(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    nn.quantize(model, 32, 4)
    return model


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_model_whose_products_are_made_together_computes_the_same(make: Any, most: int) -> None:
    alone, together = quantized(make), quantized(make)
    placed(alone, Together(), together=False)
    kernel = Together(most_together=most)
    assert isinstance(kernel, TogetherKernel)
    placed(together, kernel)
    for width in (3, *range(1, 6), 2):
        tokens = mx.arange(width)[None] + 5
        assert mx.array_equal(alone(tokens), together(tokens)), width
    layers = sum(name.endswith("mlp") for name, _ in together.named_modules())
    of_attention, of_forward = layers * (len(SERVED) + 1), layers * len(SERVED)
    assert kernel.launches.count(3) == (of_attention if most == 3 else 0), (
        "the first forward shows who shares"
    )
    assert kernel.launches.count(2) == (of_forward if most > 1 else 0), "and a number of rows is traced once"


class Part(nn.Module):
    """Two matrices for one x, and a third for another."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.a = nn.QuantizedLinear(64, 32, bias=bias, group_size=32, bits=4)
        self.b = nn.QuantizedLinear(64, 96, bias=bias, group_size=32, bits=4)
        self.c = nn.QuantizedLinear(64, 48, bias=bias, group_size=32, bits=4)
        if bias:
            for number, module in enumerate((self.a, self.b, self.c)):
                module.bias = mx.random.normal(module.bias.shape, key=mx.random.key(number))

    def __call__(self, x: mx.array, other: mx.array) -> list[mx.array]:
        return [self.a(x), self.b(x), self.c(other)]


def twins(kernel: Doubled, bias: bool = False) -> tuple[Any, Any, Switchboard]:
    """A part, the same part on a kernel after its first forward, and the kernel's switchboard."""
    mx.random.seed(3)
    part = Part(bias)
    copied = Part(bias)
    copied.update(part.parameters())
    board = placed(copied, kernel)
    x, other = mx.random.normal((2, 2, 64))
    same(part(x, other), copied(x, other))
    return part, copied, board


def same(made: Sequence[mx.array], wanted: Sequence[mx.array]) -> None:
    assert all(mx.array_equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 64), (1, 3, 64), (4, 1, 64), (1, 1, 64), (9, 64)])
def test_leading_axes_biases_and_other_numbers_of_rows(shape: tuple[int, ...], bias: bool) -> None:
    kernel = Together()
    part, copied, _ = twins(kernel, bias)
    x, other = mx.random.normal((2, *shape))
    same(part(x, other), copied(x, other))
    assert kernel.launches == ([2] if x.size // 64 in SERVED else [])
    half = x.astype(mx.float16)
    same(part(half, other), copied(half, other))


def test_the_launch_is_laid_out_for_the_largest() -> None:
    kernel = Together()
    _, copied, _ = twins(kernel)
    b_plan = RowPlan([Admitted(kernel, (2, 4), {2: ("b", 2), 4: ("b", 4)})], mx.float32, Switchboard())
    object.__setattr__(copied.b, "plan", b_plan)
    x = mx.random.normal((3, 64))
    copied(x, x)
    assert kernel.laid == [(("b", 4), [32, 96])]


@pytest.mark.parametrize("alone", ["a", "b", "ab", ""])
def test_what_is_worth_no_launch_of_its_own_joins_one(alone: str) -> None:
    kernel = Together()
    part, copied, _ = twins(kernel)
    beside = RowPlan([Admitted(kernel, (2, 4), {}, GEOMETRIES)], mx.float32, Switchboard())
    for name in {"a", "b", "c"} - set(alone):
        object.__setattr__(copied[name], "plan", beside)
    before = len(kernel.rows)
    x, other = mx.random.normal((2, 3, 64))
    same(part(x, other), copied(x, other))
    assert kernel.launches == ([2] if alone else [])
    assert len(kernel.rows) - before == (2 if alone else 0), "nor is it multiplied by itself"


def test_what_is_asked_in_another_order_or_not_at_all_is_right() -> None:
    kernel = Together()
    part, copied, _ = twins(kernel)
    x, other = mx.random.normal((2, 3, 64))
    same([copied.b(x), copied.a(x)], [part.b(x), part.a(x)])
    same([copied.b(other), copied.a(other)], [part.b(other), part.a(other)])
    launched = len(kernel.launches)
    assert launched == 1, "what was made for nobody ends it"
    for _ in range(3):
        same(copied(x, other), part(x, other))
    assert len(kernel.launches) == launched


def test_no_result_is_given_twice() -> None:
    part, copied, _ = twins(Together())
    x, y = mx.random.normal((2, 3, 64))
    same([copied.a(x), copied.b(x), copied.b(x)], [part.a(x), part.b(x), part.b(x)])
    same([copied.a(y), copied.b(y)], [part.a(y), part.b(y)])


def test_new_weights_and_a_kernel_that_is_switched_off_are_heeded() -> None:
    kernel = Together(adding=1.0)
    mx.random.seed(3)
    part, copied = Part(), Part()
    copied.update(part.parameters())
    board = placed(copied, kernel)
    x, other = mx.random.normal((2, 2, 64))
    copied(x, other)
    assert mx.allclose(copied(x, other)[1] - part(x, other)[1], mx.array(1.0), atol=1e-5)
    part.b.scales = part.b.scales * 2
    copied.b.scales = part.b.scales
    assert mx.allclose(copied(x, other)[1] - part(x, other)[1], mx.array(1.0), atol=1e-5)
    board.switch_off("doubled", "it was slow")
    same(copied(x, other), part(x, other))


def test_only_matrices_held_alike_are_joined() -> None:
    part = Part()
    part.c = nn.QuantizedLinear(64, 48, bias=False, group_size=64, bits=4)
    placed(part, Together())
    modules: list[Any] = [part.a, part.b, part.c]
    assert all(isinstance(module, KernelLinear) for module in modules)
    assert modules[0].siblings is modules[1].siblings is not None
    assert modules[2].siblings is None
