"""Laws of the CUDA attention kernel, run on a CPU: it is attention in float32, whatever the shapes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_dspark.kernels.cuda_attention.attend import attend, takes
from mlx_dspark.kernels.cuda_attention.geometry import TILE, Geometry, Plan, alone, plan, streaming
from tests.cuda_shim.kernels import CpuKernels

ROUNDING = {mx.float16: 3e-3, mx.bfloat16: 2e-2}
"""What rounding to the dtype may cost."""


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    length: int
    rows: int = 1


class Call(NamedTuple):
    """`mask`: 0 none, 1 causal, 2 booleans, of which the first query sees none."""

    dtype: mx.Dtype
    dim: int
    mask: int
    sinks: bool
    geometry: Geometry | None


def reference(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], mask: NDArray[Any] | None, sinks: NDArray[Any] | None
) -> NDArray[Any]:
    """Attention in float32; nothing where nothing is seen."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("bhwd,bhld->bhwl", q, np.repeat(k, group, 1)) * q.shape[3] ** -0.5
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    if sinks is not None:
        most = np.maximum(most, sinks[:, None, None])
    most = np.where(np.isinf(most), 0, most)
    shares = np.exp(scores - most)
    total = shares.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - most)
    return np.einsum("bhwl,bhld->bhwd", shares / np.where(total == 0, 1, total), np.repeat(v, group, 1))


def drawn(call: Call, shape: Shape, seed: int) -> list[mx.array]:
    """Queries as a projection makes them; keys and values are the first positions of a buffer that has no
    numbers after them."""
    rng = np.random.default_rng(seed)

    def made(*sizes: int) -> mx.array:
        return mx.array(rng.standard_normal(sizes).astype(np.float32)).astype(call.dtype)

    queries = made(shape.rows, shape.width, shape.heads, call.dim).swapaxes(1, 2)
    sizes = (shape.rows, shape.kv_heads, shape.length, call.dim)
    rest = mx.full((*sizes[:2], 7, call.dim), mx.nan, call.dtype)
    return [queries, *(mx.concatenate([made(*sizes), rest], 2)[:, :, : shape.length] for _ in range(2))]


def fault(kernels: CpuKernels, call: Call, shape: Shape, inputs: list[mx.array] | None = None) -> float:
    """The largest difference from the reference, over what rounding may cost; endless if keys and values are
    read more often than once a part."""
    rng = np.random.default_rng(shape.length + shape.width)
    queries, keys, values = inputs or drawn(call, shape, shape.length)
    sinks = mx.array(rng.standard_normal(shape.heads)).astype(call.dtype) if call.sinks else None
    mask, given = None, None
    if call.mask == 1:
        last = np.arange(shape.length - shape.width, shape.length)[:, None]
        mask, given = (np.arange(shape.length) <= last)[None, None], "causal"
    elif call.mask == 2:
        mask = rng.random((shape.rows, 1, shape.width, shape.length)) < 0.5
        mask[0, 0, 0] = False
        given = mx.array(mask.tolist())
    got = attend(queries, keys, values, call.dim**-0.5, given, sinks, call.geometry, kernels)
    q, k, v = (np.array(each.astype(mx.float32)) for each in (queries, keys, values))
    wanted = reference(q, k, v, mask, np.array(sinks.astype(mx.float32)) if sinks is not None else None)
    difference = float(np.abs(np.array(got.astype(mx.float32)) - wanted).max())
    pieces = shape.rows * shape.kv_heads * shape.length * 2 * call.dim // 8
    once = inputs or (kernels.pieces, kernels.most_reads) == (pieces, planned(call, shape).parts)
    return difference / ROUNDING[call.dtype] if once and np.isfinite(difference) else np.inf


def planned(call: Call, shape: Shape) -> Plan:
    rows, heads, kv_heads = shape.rows, shape.heads, shape.kv_heads
    sizes = (rows, heads, shape.width, call.dim), (rows, kv_heads, shape.length, call.dim)
    return plan(*sizes, call.geometry)


ONE, TWO, SIDES = Geometry(1, 1, 2, 2, 1), Geometry(2, 1, 1, 3, 2), Geometry(2, 2, 1, 4, 2)
TURNS = Geometry(1, 2, 2, 3, 1, in_turn=1)
WHOLE = [
    Shape(1, 1, 1, 1),
    Shape(3, 1, 5, 15),
    Shape(4, 4, 1, 16),
    Shape(8, 2, 2, 17),
    Shape(8, 1, 4, 47, rows=2),
    Shape(8, 2, 16, 48),
    Shape(16, 2, 1, 79),
    Shape(4, 1, 9, 128),
]
SPLIT = {
    ONE: [Shape(4, 1, 2, 257), Shape(3, 1, 9, 290)],
    TWO: [Shape(4, 2, 8, 129, rows=2), Shape(8, 1, 3, 177), Shape(8, 1, 5, 160)],
    SIDES: [Shape(8, 1, 8, 129), Shape(8, 2, 13, 150), Shape(3, 1, 32, 145)],
    TURNS: [Shape(4, 1, 2, 257), Shape(3, 1, 9, 290), Shape(8, 2, 8, 401, rows=2)],
}
KINDS = [
    Call(mx.float16, 64, 0, False, ONE),
    Call(mx.float16, 64, 2, True, TWO),
    Call(mx.float16, 64, 1, False, SIDES),
    Call(mx.bfloat16, 128, 2, False, ONE),
    Call(mx.bfloat16, 128, 1, True, TWO),
    Call(mx.bfloat16, 128, 0, False, SIDES),
    Call(mx.float16, 64, 1, True, TURNS),
    Call(mx.bfloat16, 128, 2, False, TURNS),
]


@pytest.mark.parametrize("call", KINDS, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_the_kernel_is_attention_in_float32_and_reads_each_key_once(
    call: Call, split: bool, tmp_path: Path
) -> None:
    assert call.geometry is not None
    kernels = CpuKernels(tmp_path)
    for shape in SPLIT[call.geometry] if split else WHOLE:
        if call.mask == 1 and shape.length < shape.width:
            continue
        assert (planned(call, shape).splits > 1) == split
        assert fault(kernels, call, shape) < 1, shape


@pytest.mark.parametrize("dim", [64, 128])
def test_geometries_of_the_plan_are_right(dim: int, tmp_path: Path) -> None:
    kernels = CpuKernels(tmp_path)
    call = Call(mx.bfloat16, dim, 1, False, None)
    assert fault(kernels, call, Shape(3, 1, 7, 200)) < 1
    for width in (2, 8, 16):
        shape = Shape(4, 1, width, 1050 if dim == 64 else 530)
        assert planned(call, shape).splits > 1
        assert fault(kernels, call, shape) < 1


@pytest.mark.parametrize("call", [each for each in KINDS if each.mask == 1], ids=str)
@pytest.mark.parametrize("sizes", [(40, 17, 9), (300, 300, 9), (700, 161, 640)], ids=str)
def test_rows_of_buffers_see_their_own_lengths_and_read_no_more(
    call: Call, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """What lies behind is no number, and a block may have nothing to do."""
    kernels, (size, *lengths) = CpuKernels(tmp_path), sizes
    rng = np.random.default_rng(size)

    def drawn(*shape: int) -> NDArray[Any]:
        return rng.standard_normal(shape).astype(np.float32)

    keys, values = (drawn(2, 2, size, call.dim) for _ in range(2))
    for row, length in enumerate(lengths):
        keys[row, :, length:] = values[row, :, length:] = np.nan
    arrays = drawn(2, 6, 3, call.dim), keys, values, drawn(6)
    q, k, v, s = (mx.array(each).astype(call.dtype) for each in arrays)
    how: tuple[Any, ...] = call.dim**-0.5, "causal", s if call.sinks else None, call.geometry, kernels
    got = attend(q, k, v, *how, lengths=mx.array(lengths, mx.int32))
    assert kernels.pieces == sum(lengths) * 2 * 2 * call.dim // 8
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = attend(q[one], k[one, :, :length], v[one, :, :length], *how)
        assert mx.all(mx.abs(got[one] - alone) < ROUNDING[call.dtype]).item(), length


@pytest.mark.parametrize("call", [KINDS[0], KINDS[4]], ids=str)
def test_keys_may_lie_anyhow(call: Call, tmp_path: Path) -> None:
    """Dims apart, keys that are no multiple of 16 bytes apart, and one head's first number at none."""
    kernels = CpuKernels(tmp_path)
    shape = Shape(4, 2, 3, 270)
    queries, keys, values = drawn(call, shape, 1)
    turned = mx.contiguous(keys.swapaxes(2, 3)).swapaxes(2, 3)
    assert (
        fault(
            kernels, call, shape, [queries, turned, mx.pad(values, [(0, 0)] * 3 + [(0, 3)])[..., : call.dim]]
        )
        < 1
    )
    assert not kernels.pieces
    numbers = mx.pad(mx.flatten(mx.contiguous(values), 2), [(0, 0), (0, 0), (0, 1)])
    each = shape.length * call.dim + 1
    shifted = mx.as_strided(numbers, values.shape, (2 * each, each, call.dim, 1))
    assert fault(kernels, call, shape, [queries, keys, shifted]) < 1
    assert kernels.pieces * 16 == shape.length * 3 * 2 * call.dim


CHANGES = {
    "takes another row's length": ("min(lengths[row],", "min(lengths[0] - row - 1,"),
    "sees one key more": ("length - width + place :", "length - width + place + 1 :"),
    "starts one tile late": ("const int tile = begin + team;", "const int tile = begin + team + 1;"),
    "stops one tile early": ("begin < to; begin += step", "begin + TEAMS < to; begin += step"),
    "forgets to rescale": ("*= kept[2 * m + (e >> 1)];", "*= e ? kept[2 * m + (e >> 1)] : 1.f;"),
    "rescales never": ("kept[i] != 1.f;", "kept[i] > 1.f;"),
    "sums the wrong team": ("float2 theirs = tops[((t * SIDES", "float2 theirs = tops[((team * SIDES"),
    "weighs no team": (
        "const float kept = exp2f(most[i] - origin);\nmost",
        "const float kept = 1.f;\nmost",
    ),
    "leaves out a team": ("x[4 * half] += four.x,", "x[4 * half] = four.x,"),
    "swaps halves of a value": ("j & 1 ? 0x7632 : 0x5410", "j & 1 ? 0x5410 : 0x7632"),
    "takes another head": ("min(n, queries - 1) / width;", "min(n, queries - 1) / group;"),
    "takes another's queries": ("(blockIdx.y * SIDES + side)", "(blockIdx.y * SIDES)"),
    "adds lanes twice": ("x + __shfl_xor_sync(0xffffffffu, x, 2)", "x + __shfl_xor_sync(0xffffffffu, x, 1)"),
    "leaves out the scale": ("scale[0] * LOG2E", "LOG2E"),
    "reads a query's other dims": ("8 * (4 * j + c) * mine.dim", "8 * (4 * j) * mine.dim"),
    "reads another key": ("keys_here[place_of(8 * t + g", "keys_here[place_of(g"),
    "reads another value": ("(r & 1) + 8 * (r >> 1), h", "(r & 1), h"),
    "waits for one copy less": ("arrived<STAGES - 2>();", "arrived<STAGES - 1>();"),
    "meets nobody": ("meet();\n", ""),
    "copies over what is in use": ("slot == 0 ? STAGES - 1 : slot - 1);", "slot);"),
    "copies past the end": ("each, begin + i * STEP + key < length);", "each, true);"),
    "copies beyond its range": ("if (tile < to) {", "if (true) {"),
    "sums over what others still read": (
        "__syncthreads();\n#pragma unroll\nfor (int i = 0; i < MINE; i++) {\ntotal",
        "#pragma unroll\nfor (int i = 0; i < MINE; i++) {\ntotal",
    ),
    "takes the tiles of the next block": ("IN_TURN ? split * TEAMS", "IN_TURN ? (split + 1) * TEAMS"),
    "takes fewer turns": ("IN_TURN ? splits * TEAMS", "IN_TURN ? (splits + 1) * TEAMS"),
    "combines one range less": ("for (int s = way; s < splits;", "for (int s = way; s + 1 < splits;"),
    "combines without weights": (
        "const float share = exp2f(tops[s].x - origin);",
        "const float share = 1.f;",
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_for_the_worse_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    kernels = CpuKernels(tmp_path, change)
    call = Call(mx.float16, 64, 1, False, Geometry(2, 2, 2, 2, 1, int("IN_TURN" in change[0])))
    try:
        found = fault(kernels, call, Shape(9, 1, 5, 270))
    except AssertionError:
        found = np.inf
    assert found > 1


def test_what_is_compiled_is_named_by_its_text() -> None:
    """MLX keeps compiled kernels on disk by name."""
    named: dict[str, str] = {}

    def factory(*, name: str, header: str, source: str, **form: Any) -> Any:
        text = header.replace(name, "") + source
        assert named.setdefault(name, text) == text
        return lambda output_shapes, **call: [mx.zeros(shape) for shape in output_shapes]

    geometries = [each for queries in (16, 32, 64) for each in streaming(64, queries)]
    for dtype, dim, mask, geometry in product(ROUNDING, (64, 128), (None, "causal"), set(geometries)):
        for length in (40, 4000):
            queries, keys = mx.zeros((1, 2, 3, dim), dtype), mx.zeros((1, 2, length, dim), dtype)
            attend(queries, keys, keys, 1.0, mask, None, geometry, factory)
    assert len(set(named.values())) == len(named)
    assert len(named) == 2 * 2 * (2 * 2 * len(set(geometries)) + 1)


@pytest.mark.parametrize(
    ("dtype", "dim", "mask"),
    [(mx.float32, 64, None), (mx.float16, 80, None), (mx.float16, 64, mx.zeros((1, 9)))],
    ids=["float32", "head size", "mask of numbers"],
)
def test_other_calls_are_not_taken(dtype: mx.Dtype, dim: int, mask: mx.array | None) -> None:
    queries, keys = mx.zeros((1, 4, 2, dim), dtype), mx.zeros((1, 2, 9, dim), dtype)
    assert not takes(queries, keys, mask, None)


@pytest.mark.parametrize("length", [1, 500, 1025, 4000, 40_000, 130_000])
@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (64, 4)])
def test_keys_are_split_so_that_every_team_has_some(heads: tuple[int, int], length: int) -> None:
    for dim, width in product((64, 128), (1, 8, 32)):
        geometry, parts, splits = plan((1, heads[0], width, dim), (1, heads[1], length, dim))
        assert parts * geometry.queries >= heads[0] // heads[1] * width
        assert 1 <= splits <= max(1, -(-length // TILE) // (2 * geometry.teams))
        assert geometry in (alone(dim), *streaming(dim, heads[0] // heads[1] * width)[:1])


@pytest.mark.parametrize("dim", [64, 128])
def test_geometries_fit_and_the_first_fit_any_device(dim: int) -> None:
    for queries in (1, 16, 17, 32, 33, 64, 128):
        offered = [alone(dim), *streaming(dim, queries)]
        assert len(set(offered)) == len(offered)
        for each in offered:
            assert each.stages > 1
            assert each.resident * (each.shared_bytes(dim) + 1024) <= 227 * 1024
            assert 32 * each.warps * each.resident <= 1024
        assert all(each.shared_bytes(dim) <= 99 * 1024 for each in offered[:2])
