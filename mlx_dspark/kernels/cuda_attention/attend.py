"""The kernel as an attention: which calls it takes, how it is laid out, and that it is right here."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

DIMS = (64, 128)
"""Head sizes whose sums fit into registers."""

TILE = 16
"""Queries and keys of a tile."""

BLOCKS = 264
"""Blocks that keep a large device busy: two for each of its multiprocessors."""

ALONE = 8
"""A warp takes so many tiles of keys before they are split over blocks, which costs a second kernel."""

_HALVES = (mx.float16, mx.bfloat16)
_TOLERANCE = 2e-2


def takes(queries: mx.array, keys: mx.array, mask: Any, sinks: mx.array | None) -> bool:
    """Whether the kernel computes this: halves of a known head size, no mask, a causal one or booleans."""
    if queries.dtype not in _HALVES or keys.dtype != queries.dtype or queries.shape[3] not in DIMS:
        return False
    if isinstance(mask, mx.array) and (mask.dtype != mx.bool_ or mask.ndim > 4):
        return False
    if sinks is not None and sinks.dtype != queries.dtype:
        return False
    return right_here(queries.dtype, queries.shape[3])


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """`[rows, heads, width, head_dim]` over keys and values `[rows, kv_heads, length, head_dim]`, in the
    queries' dtype. `mask` is None, "causal" (the queries are the last positions) or booleans that broadcast
    to `[rows, heads, width, length]`; `sinks` `[heads]` join the softmax of their head.

    A query that sees nothing gets zeros. Queries of one group of heads read each key and value once for every
    16 of them.
    """
    rows, heads, width, dim = queries.shape
    kind = 2 if isinstance(mask, mx.array) else int(mask is not None)
    warps, parts, splits = plan(queries.shape, keys.shape)
    inputs = [queries, keys, values, _scale(scale)]
    if kind == 2:
        inputs.append(mx.broadcast_to(mask, (rows, heads, width, keys.shape[2])))
    if sinks is not None:
        inputs.append(sinks)
    shape = (rows, width, heads, dim)
    shapes, dtypes = [shape], [queries.dtype]
    if splits > 1:
        shapes = [(rows, width, heads, splits, dim), (rows, width, heads, splits, 2)]
        dtypes = [mx.float32, mx.float32]
    out = _kernel(kind, sinks is not None, splits > 1)(
        inputs=inputs,
        template=[("T", queries.dtype), ("D", dim), ("WARPS", warps)],
        grid=(splits * warps * 32, parts, rows * keys.shape[1]),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
    )
    if splits > 1:
        out = _combine()(
            inputs=out,
            template=[("T", queries.dtype), ("D", dim)],
            grid=(rows * width * heads * dim, 1, 1),
            threadgroup=(dim, 1, 1),
            output_shapes=[shape],
            output_dtypes=[queries.dtype],
        )
    return out[0].swapaxes(1, 2)


def plan(queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[int, int, int]:
    """For arrays of these shapes: warps of a block, tiles of queries in a group of heads, and into how many
    ranges the keys are cut, so that the device is busy and no warp has next to nothing."""
    rows, heads, width, dim = queries
    warps = 8 if dim == 64 else 4
    parts = -(-(heads // keys[1] * width) // TILE)
    tiles = -(-keys[2] // TILE)
    if tiles <= ALONE * warps:
        return warps, parts, 1
    return warps, parts, max(1, min(BLOCKS // (rows * keys[1] * parts), tiles // (2 * warps)))


@cache
def _kernel(kind: int, sinks: bool, split: bool) -> Any:
    names = ["q", "k", "v", "scale", *(["mask"] if kind == 2 else []), *(["sinks"] if sinks else [])]
    defines = f"#define MASK {kind}\n#define SINKS {int(sinks)}\n#define SPLIT {int(split)}\n"
    return mx.fast.cuda_kernel(
        name=f"few_queries_{kind}{int(sinks)}{int(split)}",
        input_names=names,
        output_names=["parts", "weights"] if split else ["out"],
        header=defines + _text("lanes.cuh") + _text("attend.cuh"),
        source=_text("attend.cu"),
        ensure_row_contiguous=False,
    )


@cache
def _combine() -> Any:
    return mx.fast.cuda_kernel(
        name="few_queries_combine",
        input_names=["parts", "weights"],
        output_names=["out"],
        source=_text("combine.cu"),
    )


@cache
def _text(name: str) -> str:
    return (files("mlx_dspark.kernels.cuda_attention") / name).read_text()


@cache
def _scale(scale: float) -> mx.array:
    made = mx.array([scale], mx.float32)
    mx.eval(made)
    return made


@cache
def right_here(dtype: mx.Dtype, dim: int) -> bool:
    """Whether the kernel compiles on this device and agrees with float32 there, found out once a process.

    Never raises: where it does not, other attention is used.
    """
    try:
        return all(_agrees(dtype, dim, length, width) for length, width in ((40, 3), (1500, 9)))
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
