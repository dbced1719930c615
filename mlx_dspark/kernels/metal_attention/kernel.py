"""The kernel as an attention: which calls it takes, how it is laid out, and what it launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from math import e, log2
from typing import Any

import mlx.core as mx

DIMS = (64, 80, 96, 128, 192, 256)
"""Head sizes whose columns divide among SIMD groups."""

WIDTHS = range(1, 17)
"""Queries of a row."""

GROUPS = range(1, 17)
"""Query heads that share a key-value head."""

MEMORY = 32768
"""Bytes of threadgroup memory that every Apple GPU has."""

HELD = {True: (8, 96), False: (6, 64)}
"""Fragments of rows, and numbers that a lane keeps as sums, which leave registers for the rest; by whether
queries are staged."""

COLUMNS = 8
"""Times 8 columns of the output that a SIMD group can sum in registers."""

_HALVES = (mx.float16, mx.bfloat16)
_CAUSAL, _BOOLEANS = 1, 2

Factory = Callable[..., Any]
"""`mx.fast.metal_kernel`, or what stands in for it."""


@dataclass(frozen=True)
class Geometry:
    """How the work is laid out.

    simd    SIMD groups of a threadgroup, which share the columns of the output
    blocks  times 8 keys that a SIMD group scores of a tile
    staged  whether queries are copied to threadgroup memory, or read where they are
    busy    threadgroups that keep the device busy: more splits of the keys than that are not made
    """

    simd: int
    blocks: int
    staged: bool
    busy: int

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return 8 * self.blocks * self.simd

    @property
    def threads(self) -> int:
        return 32 * self.simd

    def memory(self, dim: int, fragments: int) -> int:
        """Bytes of threadgroup memory where a threadgroup holds `8 * fragments` rows."""
        staged = 2 * dim + 8 if self.staged else 0
        return 8 * fragments * (staged + 4 * self.keys + 16 + 4 * self.simd)

    def room(self, dim: int) -> int:
        """Fragments of 8 rows that a threadgroup can hold; 0 where this does not suit the head size."""
        columns = dim // 8 // self.simd
        if dim // 8 % self.simd or columns > COLUMNS:
            return 0
        fragments, sums = HELD[self.staged]
        most = min(fragments, sums // (2 * columns))
        return max((n for n in range(1, most + 1) if self.memory(dim, n) <= MEMORY - 16), default=0)


@dataclass(frozen=True)
class Plan:
    """A launch: `fragments` of 8 rows in each of `parts` threadgroups of a key-value head and a split."""

    fragments: int
    parts: int
    splits: int


def takes(
    queries: mx.array, keys: mx.array, values: mx.array, mask: Any, sinks: mx.array | None = None
) -> bool:
    """Whether the kernel computes this: up to 16 queries in halves, of a known head size, with keys and
    values alike, and no mask, a causal one or booleans. Evaluates nothing."""
    if queries.dtype not in _HALVES or {keys.dtype, values.dtype} != {queries.dtype}:
        return False
    _, heads, width, dim = queries.shape
    if dim not in DIMS or values.shape != keys.shape or keys.shape[3] != dim:
        return False
    if width not in WIDTHS or keys.shape[2] < width:
        return False
    if heads % keys.shape[1] or heads // keys.shape[1] not in GROUPS:
        return False
    if isinstance(mask, mx.array):
        if mask.dtype != mx.bool_ or mask.ndim > 4:
            return False
    elif mask not in (None, "causal"):
        return False
    return sinks is None or (sinks.dtype == queries.dtype and sinks.shape == (heads,))


def geometries(heads: int, kv_heads: int, dim: int, width: int) -> list[Geometry]:
    """Layouts that suit these shapes: the best guess first, those that read keys more often after those that
    do not, and those with fewest threads last."""
    rows = heads // kv_heads * width

    def reads(geometry: Geometry) -> int:
        return -(-rows // (8 * geometry.room(dim)))

    wide = [Geometry(8, 1, True, 96), Geometry(8, 1, False, 96)]
    four = [Geometry(4, 2, True, 96), Geometry(4, 1, True, 96), Geometry(4, 1, False, 96)]
    small = [Geometry(2, 2, True, 96), Geometry(2, 1, False, 96)]
    order = [*wide, *four[1:]] if dim > 128 else [*four, *wide] if rows <= 32 else [*four[1:], *wide]
    suiting = sorted((each for each in order if each.room(dim)), key=reads)
    suiting += [each for each in small if each.room(dim)]
    return [suiting[0], replace(suiting[0], busy=256), *suiting[1:]]


def plan(queries: tuple[int, ...], keys: tuple[int, ...], geometry: Geometry, window: int = 0) -> Plan:
    """For arrays of these shapes: as few parts as hold all rows, and splits of whole tiles, none empty.

    A split has keys enough that its partial results, written and read, are at most a quarter of what it
    reads.
    """
    batch, heads, width, dim = queries
    rows = heads // keys[1] * width
    room = geometry.room(dim)
    if not room:
        raise ValueError(f"{geometry} does not suit heads of {dim}: choose one of `geometries`")
    parts = -(-rows // (8 * room))
    fragments = -(-rows // (8 * parts))
    reach = min(keys[2], window + width - 1) if window else keys[2]
    tiles = -(-reach // geometry.keys)
    least = max(4, -(-64 * fragments // geometry.keys))
    wanted = max(1, min(geometry.busy // (batch * keys[1] * parts), tiles // least))
    return Plan(fragments, parts, -(-tiles // -(-tiles // wanted)))


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    *,
    window: int = 0,
    geometry: Geometry | None = None,
    factory: Factory | None = None,
) -> mx.array:
    """`[rows, heads, width, head_dim]` over keys and values `[rows, kv_heads, length, head_dim]`, in the
    queries' dtype, for what `takes` allows. `mask` is None, "causal" (the queries are the last positions) or
    booleans that broadcast to `[rows, heads, width, length]`; with "causal", a `window` other than 0 hides
    all but so many last positions from each query. `sinks` `[heads]` join the softmax of their head.

    A query that sees nothing gets zeros. Arrays may be strided in any way; nothing is copied. `factory`
    stands in for `mx.fast.metal_kernel`. Not evaluated: where the device refuses so many threads, evaluating
    raises ValueError, and a later one of `geometries` is to be tried. Raises ValueError for a window without
    "causal".
    """
    if window and (isinstance(mask, mx.array) or mask is None):
        raise ValueError(f'window: {window} goes with mask="causal"; add it to a mask of booleans')
    rows, heads, width, dim = queries.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    geometry = geometry or geometries(heads, kv_heads, dim, width)[0]
    laid = plan(queries.shape, keys.shape, geometry, window)
    split = laid.splits > 1
    kind = _BOOLEANS if isinstance(mask, mx.array) else _CAUSAL * (mask is not None)
    inputs = {"q": queries, "k": keys, "v": values, "scale": _number(scale * log2(e), mx.float32)}
    if kind == _BOOLEANS:
        inputs["mask"] = mx.broadcast_to(mask, (rows, heads, width, length))
    if window:
        inputs["window"] = _number(window, mx.int32)
    if sinks is not None and not split:
        inputs["sinks"] = sinks
    shape = (rows, width, heads, dim)
    partial = (laid.splits, rows, heads, width)
    factory = factory or mx.fast.metal_kernel
    made = _kernel(factory, kind, tuple(inputs), split)(
        inputs=list(inputs.values()),
        template=[
            ("T", queries.dtype),
            ("D", dim),
            ("RB", laid.fragments),
            ("KB", geometry.blocks),
            ("SG", geometry.simd),
            ("STAGED", geometry.staged),
        ],
        grid=(geometry.threads * rows * kv_heads, laid.splits, laid.parts),
        threadgroup=(geometry.threads, 1, 1),
        output_shapes=[(*partial, dim), (*partial, 2)] if split else [shape],
        output_dtypes=[mx.float32, mx.float32] if split else [queries.dtype],
    )
    found = _merged(factory, made, sinks, shape, queries.dtype) if split else made[0]
    return found.swapaxes(1, 2)


def _merged(
    factory: Factory, made: list[mx.array], sinks: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype
) -> mx.array:
    rows, width, heads, dim = shape
    return _merge(factory, sinks is not None)(
        inputs=made if sinks is None else [*made, sinks],
        template=[("T", dtype), ("D", dim)],
        grid=(32 * rows * heads * width, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )[0]


@lru_cache(maxsize=64)
def _kernel(factory: Factory, kind: int, names: tuple[str, ...], split: bool) -> Any:
    given = {"MASK": kind, "WINDOW": "window" in names, "SINKS": "sinks" in names, "SPLIT": split}
    defines = "".join(f"#define {name} {int(value)}\n" for name, value in given.items())
    return factory(
        name="few_queries_" + "".join(str(int(value)) for value in given.values()),
        input_names=list(names),
        output_names=["parts", "weights"] if split else ["out"],
        header=defines + text("parts.metal") + text("sink.metal"),
        source=text("attend.metal"),
        ensure_row_contiguous=False,
    )


@lru_cache(maxsize=64)
def _merge(factory: Factory, sinks: bool) -> Any:
    return factory(
        name=f"few_queries_merge_{int(sinks)}",
        input_names=["parts", "weights", *(["sinks"] if sinks else [])],
        output_names=["out"],
        header=f"#define SINKS {int(sinks)}\n" + text("sink.metal"),
        source=text("merge.metal"),
    )


@cache
def text(name: str) -> str:
    """A source file of this folder."""
    return (files("mlx_dspark.kernels.metal_attention") / name).read_text()


@cache
def _number(value: float, dtype: mx.Dtype) -> mx.array:
    made = mx.array(value, dtype)
    mx.eval(made)
    return made
