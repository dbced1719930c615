"""Kernels and clocks that do as they are told, for the laws of the probe and of the dispatch.

The functions without arguments at the end are asked for by name in a process of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.after import numbers_of
from mlx_dspark.kernels.framework.bench import Bench
from mlx_dspark.kernels.framework.kernel import AttentionShape, Case
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product

SIZE = 64
SHAPE = f"{SIZE}x{SIZE}-float32"
US = 1e-6


class Product(NamedTuple):
    x: mx.array
    weight: mx.array


class Timekeeper(Protocol):
    """Is told what the evaluation of a launch costs."""

    def cost(self, out: mx.array, seconds: float, *, refused: bool = False) -> mx.array: ...


class Clock:
    """Time passes by what is evaluated, and by nothing else. Arrays that nobody told of cost nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.costs: dict[int, float] = {}
        self.refused: set[int] = set()
        self.kept: list[mx.array] = []
        self.evaluations = 0

    def cost(self, out: mx.array, seconds: float, *, refused: bool = False) -> mx.array:
        """`out`, whose evaluation takes so long, or is refused by the device."""
        self.kept.append(out)
        self.costs[id(out)] = seconds
        if refused:
            self.refused.add(id(out))
        return out

    def evaluate(self, arrays: list[mx.array]) -> None:
        self.evaluations += 1
        if any(id(each) in self.refused for each in arrays):
            raise ValueError("[metal] thread group size exceeds what the device allows")
        mx.eval(arrays)
        self.seconds += sum(self.costs.get(id(each), 0.0) for each in arrays)

    def bench(self) -> Bench:
        return Bench(now=lambda: self.seconds, evaluate=self.evaluate)


@dataclass
class Scripted:
    """A product of floats. A launch of geometry `g` takes `costs[g]` seconds, MLX `stock_cost`; `refused`
    geometries are refused at evaluation. `spoil` changes the launch of this number, `slow` its cost; `raises`
    maps the names of methods to what they raise."""

    clock: Timekeeper
    costs: Mapping[Hashable, float] = field(default_factory=lambda: {"wide": 500 * US, "small": 800 * US})
    stock_cost: float = 1000 * US
    refused: Sequence[Hashable] = ()
    spoil: Callable[[mx.array, int, Hashable], mx.array] = lambda out, number, geometry: out
    slow: Callable[[float, int], float] = lambda seconds, number: seconds
    raises: Mapping[str, Exception] = field(default_factory=dict)
    name: str = "scripted"
    version: int = 1
    back_end: str = "metal"
    same_bits: bool = False
    launches: int = 0

    def _may_raise(self, method: str) -> None:
        if method in self.raises:
            raise self.raises[method]

    def draw(self, case: Case, seed: int) -> Product:
        self._may_raise("draw")
        keys = mx.random.split(mx.random.key(seed), 2)
        x, weight = (
            mx.random.normal((case.width, SIZE), key=keys[0]),
            mx.random.normal((SIZE, SIZE), key=keys[1]),
        )
        mx.eval(x, weight)
        return Product(x, weight)

    def geometries(self, case: Case) -> Sequence[Hashable]:
        self._may_raise("geometries")
        return list(self.costs)

    def launch(self, inputs: Product, geometry: Hashable) -> mx.array:
        self._may_raise("launch")
        number, self.launches = self.launches, self.launches + 1
        out = self.spoil(inputs.x @ inputs.weight.T, number, geometry)
        seconds = self.slow(self.costs[geometry], number)
        return self.clock.cost(out, seconds, refused=geometry in self.refused)

    def stock(self, inputs: Product) -> mx.array:
        self._may_raise("stock")
        return self.clock.cost(inputs.x @ inputs.weight.T, self.stock_cost)

    def after(self, inputs: Product, out: mx.array) -> Product:
        return inputs._replace(x=numbers_of(out, inputs.x.shape))

    def reference(self, inputs: Product) -> NDArray[np.float32]:
        self._may_raise("reference")
        return np.array(inputs.x) @ np.array(inputs.weight).T

    def tolerance(self, case: Case) -> float:
        self._may_raise("tolerance")
        return 1e-4


# in a process of their own ------------------------------------------------------------------------


class Timed(Scripted):
    """Real time: MLX takes 2 ms, at its first use so many seconds more, a launch next to nothing."""

    def __init__(self, doing: Callable[[], None] = lambda: None, compiling: float = 0.0) -> None:
        super().__init__(Clock())
        self._doing, self._compiling = doing, compiling

    def launch(self, inputs: Product, geometry: Hashable) -> mx.array:
        self._doing()
        return inputs.x @ inputs.weight.T

    def stock(self, inputs: Product) -> mx.array:
        time.sleep(2e-3 + self._compiling)
        self._compiling = 0.0
        return inputs.x @ inputs.weight.T


def good() -> Timed:
    return Timed()


def compiled_by_mlx() -> Timed:
    """MLX compiles its own operation first, for longer than a launch may be silent."""
    return Timed(compiling=2.5)


def never_compiled() -> Timed:
    return Timed(compiling=3600)


def chatty() -> Timed:
    """Prints on standard output, where verdicts go."""
    return Timed(lambda: print("{not json"))


def hanging() -> Timed:
    """A launch that never comes back."""
    return Timed(lambda: time.sleep(3600))


def dying() -> Timed:
    """A launch that takes its process with it."""
    return Timed(lambda: os.kill(os.getpid(), signal.SIGKILL))


def leaving() -> Timed:
    def leave() -> None:
        raise SystemExit(3)

    return Timed(leave)


def missing() -> Timed:
    raise ImportError("no such library")


# in a model ---------------------------------------------------------------------------------------


@dataclass
class Doubled:
    """A product by MLX's own operations that counts what it is asked for; `adding` marks its results."""

    name: str = "doubled"
    version: int = 1
    back_end: str = "metal"
    widths: Sequence[int] = (2, 4, 8)
    adding: float = 0.0
    raises: Mapping[str, Exception] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    def _may_raise(self, method: str) -> None:
        if method in self.raises:
            raise self.raises[method]

    def refusal(self, source: Source, dtype: mx.Dtype) -> str | None:
        self._may_raise("refusal")
        return None if source.bits == 4 else "it is not of 4 bits"

    def case(self, source: Source, dtype: mx.Dtype, width: int) -> Case:
        self._may_raise("case")
        return Case(str(MatrixShape.of(source, dtype)), width)

    def geometries(self, case: Case) -> Sequence[tuple[str, int]]:
        self._may_raise("geometries")
        return [("laid", 1), ("laid", 2)]

    def multiply(self, x: mx.array, source: Source, geometry: Any) -> mx.array:
        self.rows.append(x.size // x.shape[-1])
        assert source.scales is not None
        form: dict[str, Any] = {"group_size": source.group_size, "bits": source.bits}
        out = mx.quantized_matmul(x, source.weight, source.scales, source.biases, transpose=True, **form)
        return out + self.adding

    def draw(self, case: Case, seed: int) -> Any:
        shape = MatrixShape.parse(case.shape)
        return shape.draw_rows(case.width, seed), shape.draw(seed)

    def launch(self, inputs: Any, geometry: Any) -> mx.array:
        x, source = inputs
        return self.multiply(x, source, geometry)

    def stock(self, inputs: Any) -> mx.array:
        return self.launch(inputs, ("laid", 1))

    def after(self, inputs: Any, out: mx.array) -> Any:
        x, source = inputs
        return numbers_of(out, x.shape), source

    def reference(self, inputs: Any) -> NDArray[np.float32]:
        return exact_product(*inputs)

    def tolerance(self, case: Case) -> float:
        return 1e-3


@dataclass
class Attending:
    """MLX's attention, counted; `adding` marks its results."""

    name: str = "attending"
    version: int = 1
    back_end: str = "metal"
    widths: Sequence[int] = (2, 4)
    lengths: Sequence[int] = (8, 32)
    adding: float = 0.0
    asked: list[tuple[int, int]] = field(default_factory=list)

    def refusal(self, shape: AttentionShape) -> str | None:
        return None

    def case(self, shape: AttentionShape, width: int) -> Case:
        return Case(str(shape), width)

    def geometries(self, case: Case) -> Sequence[tuple[str]]:
        return [("laid",)]

    def takes(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, sinks: Any) -> bool:
        return sinks is None and not isinstance(mask, mx.array)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any, _: Any
    ) -> mx.array:
        self.asked.append((queries.shape[2], keys.shape[2]))
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        return out + self.adding

    def draw(self, case: Case, seed: int) -> Any:
        raise NotImplementedError

    launch = stock = after = reference = draw

    def tolerance(self, case: Case) -> float:
        return 1e-3


MADE: dict[str, Any] = {}
"""Kernels by name for `made_by` of an entry: "tests.scripted_kernels:current"."""


def current() -> Any:
    made = MADE["kernel"]
    if isinstance(made, Exception):
        raise made
    return made


def second() -> Any:
    return MADE["second"]
