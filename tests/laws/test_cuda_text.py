"""Laws of kernels whose text is given once, on a stand-in that keeps compiled kernels by name as MLX does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.kernels.cuda_common.named import NamedKernel

HEADER, SOURCE = "struct Sum {};\n", "y[0] = x_shape[0] + k_strides[1] + k_ndim;"


class ByName:
    """`mx.fast.cuda_kernel` that compiles at the first launch of a name and template. A result is the sum
    of the inputs; it notes what of them is passed on, and how much text each launch carried."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[Any, ...], str] = {}
        self.carried: list[int] = []
        self.zeros: list[list[bool]] = []
        self.passed: list[list[str]] = []

    def __call__(
        self, *, name: str, input_names: list[str], output_names: list[str], header: str, source: str
    ) -> Callable[..., list[mx.array]]:
        passed = [
            one + fact
            for one in input_names
            for fact in ("_shape", "_strides", "_ndim")
            if one + fact in source
        ]

        def launch(*, inputs: list[mx.array], template: Any = (), **call: Any) -> list[mx.array]:
            assert call == {"grid": (1, 1, 1)}
            key = name, *(str(value) for _, value in template)
            if key not in self.compiled:
                if "y[0]" not in source:
                    raise RuntimeError("Failed to compile kernel")
                self.compiled[key] = header + source
            self.carried.append(len(header + source))
            self.passed.append(passed)
            self.zeros.append([not mx.any(each).item() for each in inputs])
            return [sum(inputs, mx.array(0.0))]

        return launch


def kernel(by_name: ByName, **options: Any) -> NamedKernel:
    return NamedKernel(
        name="few",
        input_names=["x", "k"],
        output_names=["y"],
        header=HEADER,
        source=SOURCE,
        factory=by_name,
        **options,
    )


def test_a_text_is_compiled_at_the_first_call_and_carried_no_more() -> None:
    by_name = ByName()
    few = kernel(by_name, once=True)
    x, k = mx.ones((3,)), mx.full((3,), 2.0)
    for _ in range(3):
        assert mx.array_equal(few(inputs=[x, k], grid=(1, 1, 1))[0], x + k)
    assert by_name.carried[0] == len(HEADER + SOURCE)
    assert by_name.zeros == [[True, True], *[[False, False]] * 3]
    assert max(by_name.carried[1:]) < 40
    assert by_name.passed == [["x_shape", "k_strides", "k_ndim"]] * 4, "a launch passes the same"


def test_each_template_is_compiled() -> None:
    by_name = ByName()
    few = kernel(by_name, once=True)
    x = mx.ones((3,))
    for _ in range(2):
        for dtype, dim in ((mx.float16, 64), (mx.bfloat16, 64), (mx.float16, 128)):
            few(inputs=[x, x], template=[("T", dtype), ("D", dim)], grid=(1, 1, 1))
    assert len(by_name.compiled) == 3
    assert sum(length > 40 for length in by_name.carried) == 3


def test_inputs_that_are_there_are_used_to_compile() -> None:
    by_name = ByName()
    kernel(by_name, once=True, lazy=1)(inputs=[mx.ones((3,)), mx.ones((3,))], grid=(1, 1, 1))
    assert by_name.zeros[0] == [True, False]


@pytest.mark.parametrize("once", [None, False])
def test_what_stands_in_for_mlx_gets_the_whole_text_with_every_launch(once: bool | None) -> None:
    by_name = ByName()
    few = kernel(by_name, once=once)
    for _ in range(2):
        few(inputs=[mx.ones((3,)), mx.ones((3,))], grid=(1, 1, 1))
    assert by_name.carried == [len(HEADER + SOURCE)] * 2
    assert by_name.zeros == [[False, False]] * 2


def test_what_a_device_refuses_is_raised_by_every_call() -> None:
    def refusing(**form: Any) -> Callable[..., Any]:
        def launch(**call: Any) -> Any:
            raise ValueError("too many threads")

        return launch

    few = NamedKernel(
        name="few", input_names=["x"], output_names=["y"], source=SOURCE, factory=refusing, once=True
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="too many threads"):
            few(inputs=[mx.ones((3,))], grid=(1, 1, 1))


def test_a_kernel_is_compiled_while_a_function_is_traced() -> None:
    """Zeros are no part of what is traced. The stand-in looks at its inputs, which MLX does not."""
    by_name = ByName()
    few = kernel(by_name, once=True)
    compiled: list[int] = []

    def traced(x: mx.array) -> mx.array:
        if not compiled:
            with pytest.raises(ValueError, match="eval"):
                few(inputs=[x, x], grid=(1, 1, 1))
            compiled.append(len(by_name.compiled))
        return x + 1

    run: Any = mx.compile(traced)
    assert mx.array_equal(run(mx.ones((3,))), mx.full((3,), 2.0))
    assert compiled == [1]
