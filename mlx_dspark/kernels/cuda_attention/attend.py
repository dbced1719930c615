"""The kernel as an attention: which calls it takes, how it is laid out, and that it is right here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from threading import get_ident
from typing import Any

import mlx.core as mx

from mlx_dspark.kernels.cuda_attention.geometry import Geometry, plan
from mlx_dspark.kernels.cuda_common.build import HALVES, Block, Factory, File, Text, built, constants

DIMS = (64, 128)
"""Head sizes whose sums fit into registers."""

COMBINING = 128
"""Threads that add what blocks found for a query."""

_TOLERANCE = 2e-2


def takes(queries: mx.array, keys: mx.array, mask: Any, sinks: mx.array | None) -> bool:
    """Whether the kernel computes this: halves of a known head size, no mask, a causal one or booleans."""
    if queries.dtype not in HALVES or keys.dtype != queries.dtype or queries.shape[3] not in DIMS:
        return False
    if isinstance(mask, mx.array) and (mask.dtype != mx.bool_ or mask.ndim > 4):
        return False
    if sinks is not None and sinks.dtype != queries.dtype:
        return False
    return right_here(queries.dtype, queries.shape[3])


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    geometry: Geometry | None = None,
    factory: Factory | None = None,
    lengths: mx.array | None = None,
) -> mx.array:
    """`[rows, heads, width, head_dim]` over keys and values `[rows, kv_heads, length, head_dim]`, in the
    queries' dtype. `mask` is None, "causal" (the queries are the last positions) or booleans that broadcast
    to `[rows, heads, width, length]`; `sinks` `[heads]` join the softmax of their head. `geometry` is the
    plan's where none is given. With "causal", `lengths`, int32 `[rows]`, may say that row `r` has only the
    first `lengths[r]` of the keys, at least `width`.

    A query that sees nothing gets zeros. Queries of one group of heads read each key and value once for every
    `geometry.queries` of them.
    """
    kind = 2 if isinstance(mask, mx.array) else int(mask is not None)
    form = (queries.dtype, kind, sinks is not None)
    first, *second = _launches(queries.shape, keys.shape, form, geometry, factory)
    inputs = [queries, keys, values, _scale(scale)]
    if kind == 1:
        inputs.append(_lengths(queries.shape[0], keys.shape[2], get_ident()) if lengths is None else lengths)
    if kind == 2:
        inputs.append(mx.broadcast_to(mask, (*queries.shape[:3], keys.shape[2])))
    if sinks is not None:
        inputs.append(sinks)
    out = first(inputs=inputs)
    for launch in second:
        out = launch(inputs=out)
    return out[0].swapaxes(1, 2)


Form = tuple[mx.Dtype, int, bool]
"""The numbers' type; no mask, a causal one or booleans; whether there are sinks."""

Launch = Callable[..., list[mx.array]]


@lru_cache(maxsize=128)
def _launches(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    form: Form,
    geometry: Geometry | None,
    factory: Factory | None,
) -> list[Launch]:
    """Of arrays of these shapes, which the layers of a round share: the kernel, and the one that adds what
    it found where keys are split over blocks."""
    (rows, heads, width, dim), dtype = queries, form[0]
    geometry, parts, splits = plan(queries, keys, geometry)
    threads = 32 * geometry.warps
    shape = (rows, width, heads, dim)
    found = [(rows, width, heads, splits, each) for each in (dim, 2)]
    first = partial(
        _kernel(dim, form, splits > 1, geometry, factory),
        grid=(splits * threads, parts, rows * keys[1]),
        threadgroup=(threads, 1, 1),
        output_shapes=found if splits > 1 else [shape],
        output_dtypes=[mx.float32, mx.float32] if splits > 1 else [dtype],
    )
    if splits == 1:
        return [first]
    second = partial(
        _combine(dtype, dim, factory),
        grid=(rows * width * heads * COMBINING, 1, 1),
        threadgroup=(COMBINING, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    return [first, second]


@cache
def _kernel(dim: int, form: Form, split: bool, geometry: Geometry, factory: Factory | None) -> Any:
    dtype, mask, sinks = form
    kind = HALVES[dtype]
    defines = f"#define MASK {mask}\n#define SINKS {int(sinks)}\n#define SPLIT {int(split)}\n"
    inputs = {"q": kind, "k": kind, "v": kind, "scale": "float"}
    inputs |= [{}, {"lengths": "int32_t"}, {"mask": "bool"}][mask] | ({"sinks": kind} if sinks else {})
    laid = geometry._asdict()
    del laid["resident"]
    sizes = constants(D=dim, **{name.upper(): value for name, value in laid.items()})
    text = Text(
        [f"{defines}namespace few_queries {{\nusing T = {kind};\n{sizes}}}\n", _file("attend.cuh")],
        _file("attend.cu"),
        inputs,
        {"parts": "float", "weights": "float"} if split else {"out": kind},
    )
    block = Block(32 * geometry.warps, geometry.resident, geometry.shared_bytes(dim))
    return built("few_queries", text, block, factory, ensure_row_contiguous=False)


@cache
def _combine(dtype: mx.Dtype, dim: int, factory: Factory | None) -> Any:
    kind = HALVES[dtype]
    header = f"namespace few_queries {{\nusing T = {kind};\n{constants(D=dim, THREADS=COMBINING)}}}\n"
    text = Text([header], _file("combine.cu"), {"parts": "float", "weights": "float"}, {"out": kind})
    return built("few_queries_combine", text, Block(COMBINING, 1, 0), factory)


def _file(name: str) -> File:
    return File("cuda_attention", name)


@cache
def _scale(scale: float) -> mx.array:
    made = mx.array([scale], mx.float32)
    mx.eval(made)
    return made


@lru_cache(maxsize=8)
def _lengths(rows: int, length: int, thread: int) -> mx.array:
    del thread
    return mx.array([length] * rows, mx.int32)


@cache
def right_here(dtype: mx.Dtype, dim: int) -> bool:
    """Whether the kernel compiles on this device and agrees with float32 there, found out once a process.

    Never raises: where it does not, other attention is used.
    """
    try:
        return all(_agrees(dtype, dim, *case) for case in ((40, 3), (1500, 3), (1500, 9), (1500, 20)))
    except (RuntimeError, ValueError):
        return False


def _agrees(dtype: mx.Dtype, dim: int, length: int, width: int) -> bool:
    key = mx.random.key(length)
    shapes = ((1, 6, width, dim), (1, 2, length, dim), (1, 2, length, dim))
    seeds = mx.random.split(key, 3)
    made = [mx.random.normal(shape, key=k).astype(dtype) for shape, k in zip(shapes, seeds, strict=True)]
    queries, keys, values = made
    scale = dim**-0.5
    got = attend(queries, keys, values, scale, "causal", None).astype(mx.float32)
    wide = [each.astype(mx.float32) for each in made]
    scores = (wide[0].reshape(1, 2, 3, width, dim) * scale) @ wide[1][:, :, None].swapaxes(-1, -2)
    seen = mx.arange(length) <= mx.arange(length - width, length)[:, None]
    shares = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)
    wanted = (shares @ wide[2][:, :, None]).reshape(got.shape)
    return bool(mx.all(mx.abs(got - wanted) < _TOLERANCE).item())
