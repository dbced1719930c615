"""The small-M product on CUDA beside MLX's own: time a launch, share of the copy bandwidth, error.

    python benchmarks/small_m.py                          # Qwen3-8B's matrices, a forward, a small model's
    python benchmarks/small_m.py --only products --bits 4 --widths 1 8 --json out.json

Launches depend on each other, as in a model: the beginning of one's output is the input of the next, over
copies of the weights that the cache cannot hold. A row is one matrix and width: microseconds a launch
of MLX's own and of every geometry, and the best one's bytes of weights a second as a share of a copy's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_small_m.geometry import Geometry, ways
from mlx_dspark.kernels.cuda_small_m.kernel import CudaSmallM, product
from mlx_dspark.kernels.framework.rows import Rows
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product

MATRICES = ((12288, 4096), (4096, 12288), (151936, 4096), (4096, 4096))
SMALL = ((576, 576), (1536, 576), (576, 1536), (49152, 576))
CACHE = 50e6
CHECKED = 1024
SHOWN = 6
PRODUCTS = 4
TRIALS = 5

OFFERED: dict[int, Sequence[Geometry]] = {
    4: (
        Geometry(2, 8, 2, 4, 1, hold=True),
        Geometry(1, 8, 2, 4, 1, hold=True),
        Geometry(2, 8, 3, 2, 1, hold=True),
        Geometry(1, 8, 2, 4, 2),
        Geometry(1, 8, 3, 2, 2),
        Geometry(2, 8, 2, 4, 1),
        Geometry(2, 8, 2, 2, 2),
        Geometry(4, 8, 2, 2, 1),
        Geometry(1, 16, 2, 2, 1, hold=True),
        Geometry(2, 16, 2, 2, 1),
    ),
    8: (
        Geometry(1, 8, 3, 2, 1, hold=True),
        Geometry(1, 8, 2, 2, 1, hold=True),
        Geometry(2, 8, 3, 1, 1, hold=True),
        Geometry(1, 8, 2, 2, 2),
        Geometry(2, 8, 2, 1, 2),
        Geometry(2, 8, 2, 2, 1),
        Geometry(4, 8, 2, 1, 1),
    ),
}


@dataclass(frozen=True)
class Copies:
    """One matrix many times over."""

    shape: MatrixShape
    held: list[Source]

    @classmethod
    def drawn(cls, shape: MatrixShape, launches: int) -> Copies:
        number = int(max(2, min(launches, 1 + 6 * CACHE // nbytes(shape))))
        return cls(shape, [shape.draw(seed) for seed in range(number)])

    def inputs(self, x: mx.array, number: int) -> Rows:
        return Rows(x, self.held[number % len(self.held)])


def nbytes(shape: MatrixShape) -> int:
    """What a product reads of the matrix: codes, scales and biases."""
    return shape.outputs * (shape.inputs * shape.bits // 8 + shape.inputs // shape.group_size * 4)


Step = tuple[Copies, Callable[[Rows], mx.array]]


stock = CudaSmallM().stock


class Head:
    """Work that keeps the device busy while what follows is encoded, so that the host is not measured."""

    def __init__(self) -> None:
        self._matrix = mx.zeros((8192, 8192), mx.bfloat16)
        mx.eval(self._matrix)

    def before(self, x: mx.array) -> mx.array:
        """`x`, after some milliseconds of other work."""
        made = self._matrix
        for _ in range(PRODUCTS):
            made = made @ self._matrix
        return x + made[0, 0]


def chain_us(head: Head, steps: Sequence[Step], width: int, times: int) -> float:
    """Microseconds of the steps one after another on the device, each on the beginning of what the last one
    made."""
    start = steps[0][0].shape.draw_rows(width, width)
    found = []
    for _ in range(TRIALS):
        first = head.before(start)
        alone = seconds(first, first)
        now = first = head.before(start)
        for i in range(times):
            for copies, call in steps:
                inputs = copies.shape.inputs
                x = (
                    now
                    if now.shape[-1] == inputs
                    else now.reshape(-1)[: width * inputs].reshape(width, inputs)
                )
                now = call(copies.inputs(x, i))
        found.append((seconds(first, now) - alone) / times)
    return median(found) * 1e6


def seconds(first: mx.array, last: mx.array) -> float:
    """Until `last` is there; the device begins with `first` before the rest is encoded."""
    mx.synchronize()
    started = perf_counter()
    mx.async_eval(first)
    mx.eval(last)
    mx.synchronize()
    return perf_counter() - started


class Chain:
    """Times launches of one matrix that depend on each other. A matrix with fewer outputs than inputs takes
    turns with its transposed shape, whose own time is taken off."""

    def __init__(self, shape: MatrixShape, head: Head) -> None:
        self._head = head
        self.times = 20 if nbytes(shape) > 2e8 else 50
        self.copies = Copies.drawn(shape, self.times)
        self._before: list[Step] = []
        if shape.outputs < shape.inputs:
            other = replace(shape, outputs=shape.inputs, inputs=shape.outputs)
            geometry = ways(other, 16)[0]
            self._before = [(Copies.drawn(other, self.times), lambda inputs: _ours(geometry, inputs))]

    def us(self, call: Callable[[Rows], mx.array], width: int) -> float:
        steps = [*self._before, (self.copies, call)]
        chain_us(self._head, steps, width, 3)
        whole = chain_us(self._head, steps, width, self.times)
        before = chain_us(self._head, self._before, width, self.times) if self._before else 0.0
        return whole - before


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of x + 1 on 2 GB."""
    x = mx.zeros((1 << 29,), mx.float32)
    mx.eval(x)
    best = 0.0
    for _ in range(6):
        mx.synchronize()
        started = perf_counter()
        mx.eval(x + 1)
        mx.synchronize()
        best = max(best, 2 * x.nbytes / (perf_counter() - started))
    return best


def wanted(copies: Copies, x: mx.array) -> NDArray[np.float32]:
    """The last CHECKED outputs of the first copy in float32."""
    source = copies.held[0]
    assert source.scales is not None
    assert source.biases is not None
    weight, scales, biases = (each[-CHECKED:] for each in (source.weight, source.scales, source.biases))
    last = replace(source, outputs=weight.shape[0], weight=weight, scales=scales, biases=biases)
    return exact_product(x, last)


def error(got: mx.array, expected: NDArray[np.float32]) -> float:
    """As a share of the largest output."""
    last = np.array(got.astype(mx.float32))[:, -CHECKED:]
    return float(np.abs(last - expected).max() / np.abs(expected).max())


def measure(
    shape: MatrixShape, widths: Sequence[int], offered: Sequence[Geometry], copy: float, head: Head
) -> list[dict[str, Any]]:
    chain = Chain(shape, head)
    rows = []
    for width in widths:
        x = shape.draw_rows(width, width)
        expected = wanted(chain.copies, x)
        row: dict[str, Any] = {"shape": str(shape), "width": width, "stock_us": chain.us(stock, width)}
        row["floor_us"] = nbytes(shape) / copy * 1e6
        row["ours_us"], row["error"] = {}, {}
        for geometry in offered:
            if not geometry.fits(shape, -(-width // 8)):
                continue
            name = label(geometry)
            try:
                row["error"][name] = error(_ours(geometry, chain.copies.inputs(x, 0)), expected)
                row["ours_us"][name] = chain.us(partial(_ours, geometry), width)
            except (RuntimeError, ValueError) as problem:
                row["error"][name] = float("inf")
                print("  refused", name, str(problem)[:300], flush=True)
        rows.append(row)
        print(line(row), flush=True)
    return rows


def _ours(geometry: Geometry, rows: Rows) -> mx.array:
    return product(rows.x, rows.source, geometry)


def label(geometry: Geometry) -> str:
    form = geometry[:5]
    return ".".join(map(str, form)) + ("" if geometry.steady else "n") + ("h" if geometry.hold else "")


def line(row: dict[str, Any]) -> str:
    ours = row["ours_us"]
    best = min(ours, key=ours.get, default="")
    if not best:
        return f"{row['shape']:28} w{row['width']:<3} stock {row['stock_us']:7.1f} ours none"
    times = " ".join(
        f"{name}={us:.1f}" for name, us in sorted(ours.items(), key=lambda each: each[1])[1:SHOWN]
    )
    share = row["floor_us"] / ours[best]
    worst = max(row["error"].values())
    return (
        f"{row['shape']:28} w{row['width']:<3} floor {row['floor_us']:6.1f} stock {row['stock_us']:7.1f} best"
        f" {ours[best]:6.1f} = {share:4.0%} {best} err {worst:.1e} | {times}"
    )


# -- a whole forward ----------------------------------------------------------------------------------------


def forward(bits: int, widths: Sequence[int], context: int) -> list[dict[str, Any]]:
    """Milliseconds of a Qwen3-8B shape's forward, by MLX alone and with this kernel in its linear layers."""
    import mlx.nn as nn
    from mlx_lm.models.cache import make_prompt_cache

    from benchmarks.shapes import GROUP, SHAPES
    from mlx_dspark.compat.mlx_lm_models import empty_model

    model: Any = empty_model(SHAPES["qwen3-8b"])
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=GROUP, bits=bits)
    for part in (*model.layers, model):
        mx.eval(part.parameters())
        mx.clear_cache()
    cache: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.ones((1, context), mx.int32), cache=cache))
    rows = []
    times = {"stock": {w: forward_ms(model, cache, w) for w in widths}}
    replace_linears(model)
    times["ours"] = {w: forward_ms(model, cache, w) for w in widths}
    for name, each in times.items():
        rows.append({"forward": f"qwen3-8b {bits}b", "by": name, "ms": each})
        print(
            f"forward qwen3-8b {bits}b {name}",
            " ".join(f"w{w}={ms:.2f}" for w, ms in each.items()),
            flush=True,
        )
    return rows


def forward_ms(model: Any, cache: list[Any], width: int) -> float:
    times = []
    tokens = mx.ones((1, width), mx.int32)
    for _ in range(12):
        started = perf_counter()
        mx.eval(mx.argmax(model(tokens, cache=cache), axis=-1))
        times.append(perf_counter() - started)
        for each in cache:
            each.trim(width)
    return median(times[2:]) * 1e3


def replace_linears(model: Any) -> None:
    import mlx.nn as nn
    from mlx.utils import tree_unflatten

    class Product(nn.Module):
        def __init__(self, held: nn.QuantizedLinear) -> None:
            super().__init__()
            found = Source.of(held)
            assert found is not None
            assert found.scales is not None
            self._source = found
            shape = MatrixShape.of(found, found.scales.dtype)
            self._ways = {rows: ways(shape, rows)[0] for rows in range(1, 17)}

        def __call__(self, x: mx.array) -> mx.array:
            return product(x, self._source, self._ways[x.size // x.shape[-1]])

    for name, module in list(model.named_modules()):
        if type(module) is nn.QuantizedLinear:
            model.update_modules(tree_unflatten([(name, Product(module))]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8], choices=(4, 8))
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--only", nargs="+", default=["products", "small", "forward"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    copy, head = copy_bandwidth(), Head()
    print(f"copy {copy / 1e12:.2f} TB/s; {mx.device_info()}", flush=True)
    rows: list[dict[str, Any]] = [{"copy": copy}]

    def keep(more: list[dict[str, Any]]) -> None:
        rows.extend(more)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, default=str))

    for bits in options.bits if "products" in options.only else ():
        for outputs, inputs in MATRICES:
            shape = MatrixShape(outputs, inputs, bits, 64, mx.bfloat16)
            keep(measure(shape, options.widths, OFFERED[bits], copy, head))
            mx.clear_cache()
    for bits in options.bits if "forward" in options.only else ():
        keep(forward(bits, [1, 2, 3, 4, 6, 8, 12, 16], options.context))
        mx.clear_cache()
    if "small" in options.only:
        for outputs, inputs in SMALL:
            shape = MatrixShape(outputs, inputs, 4, 32, mx.float16)
            keep(measure(shape, [1, 8], ways(shape, 8), copy, head))


if __name__ == "__main__":
    main()
