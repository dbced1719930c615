"""Laws of the Metal attention kernel, run on a CPU: it is attention in float32, and reads keys once."""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.kernels.framework.kernel import AttentionKernel, AttentionShape
from mlx_dspark.kernels.metal_attention.cases import MetalAttention, attention_shape
from mlx_dspark.kernels.metal_attention.kernel import (
    DIMS,
    MEMORY,
    Geometry,
    attend,
    geometries,
    plan,
    takes,
    text,
)
from tests import metal_shim as shim
from tests.attention_mutations import MUTATION_TRIALS, MUTATIONS
from tests.attention_trials import UNIT, AttentionTrial
from tests.metal_shim import gates, mutations
from tests.metal_shim.capture import Change

WIDE, FOUR, PAIR = Geometry(8, 1, True, 96), Geometry(4, 2, True, 96), Geometry(2, 1, True, 96)
NARROW = Geometry(4, 1, True, 96)
LOOSE = [Geometry(simd, 1, False, 96) for simd in (2, 4, 8)]
BF = mx.bfloat16

TRIALS = [
    # head sizes, as laid out first
    AttentionTrial(4, 2, 64, 5, 37),
    AttentionTrial(2, 2, 80, 3, 64, BF),
    AttentionTrial(6, 2, 96, 2, 65),
    AttentionTrial(9, 3, 128, 5, 63, BF),
    AttentionTrial(8, 2, 192, 4, 40),
    AttentionTrial(6, 1, 256, 8, 70, BF),
    # layouts: splits and a tail, few keys, several parts
    AttentionTrial(8, 2, 64, 8, 300, geometry=NARROW, rows=2, sinks=True),
    AttentionTrial(3, 1, 96, 7, 300, BF, geometry=PAIR, sinks=True),
    AttentionTrial(4, 2, 128, 9, 270, geometry=NARROW, mask="none"),
    AttentionTrial(16, 1, 64, 16, 21, geometry=WIDE),
    AttentionTrial(16, 1, 128, 16, 16, BF, geometry=FOUR),
    AttentionTrial(4, 1, 256, 3, 150, geometry=LOOSE[1]),
    AttentionTrial(2, 1, 80, 16, 33, geometry=LOOSE[0]),
    AttentionTrial(4, 2, 128, 5, 33, BF, geometry=LOOSE[1]),
    AttentionTrial(5, 1, 192, 6, 90, geometry=LOOSE[2]),
    # masks and windows
    AttentionTrial(4, 2, 64, 4, 200, rows=2, mask="random", sinks=True),
    AttentionTrial(4, 2, 96, 3, 200, BF, rows=3, mask="random"),
    AttentionTrial(4, 4, 64, 5, 400, geometry=PAIR, rows=2, mask="ragged"),
    AttentionTrial(4, 2, 128, 6, 500, window=33, sinks=True),
    AttentionTrial(8, 1, 64, 8, 700, BF, geometry=PAIR, window=200),
    AttentionTrial(1, 1, 64, 1, 9, mask="none"),
    # memory
    AttentionTrial(4, 2, 64, 5, 70, lay="apart", mask="random", rows=2),
    AttentionTrial(4, 2, 96, 5, 70, BF, lay="odd", geometry=LOOSE[1]),
    AttentionTrial(1, 1, 128, 2, 3, mask="random"),
    AttentionTrial(4, 2, 64, 5, 40, BF, loud=100.0),
]


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_the_kernel_is_attention_in_float32(trial: AttentionTrial) -> None:
    for schedule in shim.SCHEDULES:
        assert trial(schedule, shim.Mode.PLAIN) is None, schedule


TRAFFIC = [
    AttentionTrial(8, 2, 128, 8, 640, geometry=Geometry(4, 2, True, 8)),
    AttentionTrial(6, 1, 64, 3, 301, geometry=Geometry(4, 1, False, 8), rows=2),
    AttentionTrial(4, 2, 96, 5, 300, geometry=PAIR, window=100),
    AttentionTrial(4, 2, 64, 4, 200, geometry=PAIR, rows=3, mask="ragged"),
]


@pytest.mark.parametrize("trial", TRAFFIC, ids=str)
def test_keys_and_values_are_read_once_and_only_if_seen(trial: AttentionTrial) -> None:
    error, ran = trial.ran(mode=shim.Mode.TRAFFIC)
    assert error <= 1
    assert trial.overread(ran) is None
    traffic = ran.launches[0].traffic
    for name in "kv":
        assert traffic[name].loaded == traffic[name].by_threadgroups == traffic[name].distinct
    for name, launch in product(("parts", "weights"), ran.launches[1:]):
        assert launch.traffic[name].distinct == launch.traffic[name].size


def test_what_threadgroups_share_is_little_beside_keys_and_values() -> None:
    _, ran = TRAFFIC[0].ran(mode=shim.Mode.TRAFFIC)
    both = sum(ran.launches[0].traffic[name].loaded for name in "kv")
    assert ran.launches[0].threadgroup_traffic[0] < 2.5 * both


SANITIZED = [
    (AttentionTrial(6, 2, 64, 5, 150, BF, geometry=PAIR, sinks=True), shim.Mode.THREAD),
    (AttentionTrial(6, 2, 80, 5, 75, geometry=PAIR, rows=2, mask="random"), shim.Mode.ADDRESS),
]


@pytest.mark.parametrize(("trial", "mode"), SANITIZED, ids=str)
def test_sanitizers_find_nothing(trial: AttentionTrial, mode: shim.Mode) -> None:
    assert trial("forward", mode) is None


@pytest.mark.parametrize("mutation", MUTATIONS[::5], ids=lambda mutation: mutation.name)
def test_mistakes_are_found(mutation: mutations.Mutation) -> None:
    """All of them: `python -m benchmarks.metal_mutations`."""
    assert mutations.found(mutation, MUTATION_TRIALS[mutation.trial], mutation.mode) is not None


# addresses -----------------------------------------------------------------------------------------

FAR = [(3, 7, 131_071), (0, 15, 99), (63, 0, 131_071)]
STRIDES = (15 * 2**28 + 4, 2**28, 256, 1)
"""Of a cache of 16 heads of 256 and 2^20 positions in each row of a batch, which ends past 2^31 bytes."""


def places(change: Change | None) -> list[list[int]]:
    """What the kernel takes for the places `FAR`, in elements, and for rows of partial results."""

    def launched(factory: Any) -> mx.array:
        source = """
            const uint i = thread_position_in_grid.x;
            out[2 * i] = few_queries::place(strides, at[3 * i], at[3 * i + 1], at[3 * i + 2]);
            out[2 * i + 1] = few_queries::partial(at[3 * i + 1], 1 << 20, at[3 * i + 2]) * 4096;
        """
        made = factory("places", ["strides", "at"], ["out"], source, header=text("parts.metal"))
        return made(
            inputs=[mx.array(STRIDES, mx.int64), mx.array(FAR, mx.int32)],
            grid=(len(FAR), 1, 1),
            threadgroup=(len(FAR), 1, 1),
            output_shapes=[(len(FAR), 2)],
            output_dtypes=[mx.int64],
        )[0]

    found = shim.run(launched, change=change).value.tolist()
    assert isinstance(found, list)
    return found


NARROWED = [
    None,
    ("inline long place(", "inline int place("),
    ("inline long partial(", "inline int partial("),
]


@pytest.mark.parametrize(
    "change", NARROWED, ids=["as it is", "places in 32 bits", "partial results in 32 bits"]
)
def test_places_pass_2_to_the_31(change: Change | None) -> None:
    wanted = [
        [sum(a * b for a, b in zip(at, STRIDES[:3], strict=True)), ((at[1] << 20) + at[2]) * 4096]
        for at in FAR
    ]
    assert min(map(max, wanted)) > 2**31
    assert (places(change) == wanted) == (change is None)


DENSE = [
    (0, (512, 128, 64, 1), True),
    (4, (512, 128, 64, 1), True),
    (1, (512, 128, 64, 1), False),
    (2, (512, 128, 64, 1), False),
    (0, (512, 128, 64, 2), False),
    (0, (512, 128, 66, 1), False),
    (0, (512, 129, 64, 1), False),
    (0, (513, 128, 64, 1), False),
]


@pytest.mark.parametrize(("first", "strides", "dense"), DENSE, ids=str)
def test_vectors_are_read_where_all_of_them_are_aligned(
    first: int, strides: tuple[int, ...], dense: bool
) -> None:
    def launched(factory: Any) -> mx.array:
        source = f"out[0] = few_queries::is_dense(x + {first}, strides);"
        made = factory("dense", ["x", "strides"], ["out"], source, header=text("parts.metal"))
        return made(
            inputs=[mx.zeros((64,), mx.float16), mx.array(strides, mx.int64)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.bool_],
        )[0]

    assert shim.run(launched).value.item() is dense


# layouts -------------------------------------------------------------------------------------------

HEADS = [(8, 8), (9, 3), (24, 4), (32, 8), (64, 4)]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_layout_is_within_limits_and_holds_all_rows(heads: tuple[int, int], dim: int) -> None:
    for width in (1, 2, 8, 16):
        found = geometries(*heads, dim, width)
        assert len(found) > 2
        assert min(each.threads for each in found) == found[-1].threads <= 128
        for geometry, length, rows in product(found, (width, 700, 131_072), (1, 4)):
            laid = plan((rows, heads[0], width, dim), (rows, heads[1], length, dim), geometry)
            assert geometry.threads <= 256
            assert geometry.memory(dim, laid.fragments) + 16 <= MEMORY
            assert 8 * laid.fragments * laid.parts >= heads[0] // heads[1] * width
            tiles = -(-length // geometry.keys)
            assert (laid.splits - 1) * -(-tiles // laid.splits) < tiles
            assert laid.splits == 1 or laid.splits * laid.parts * heads[1] * rows <= geometry.busy


def test_longer_keys_are_split_more() -> None:
    splits = [
        plan((1, 32, 8, 128), (1, 8, length, 128), geometries(32, 8, 128, 8)[0]).splits
        for length in (64, 512, 1024, 2048, 8192, 131_072)
    ]
    assert splits == sorted(splits)
    assert splits[0] == 1
    assert splits[-1] >= 8


GATED = [(32, 8, 128, 8), (24, 4, 256, 8), (9, 3, 64, 4)]


@pytest.mark.parametrize("shape", GATED, ids=str)
def test_layouts_fit_registers_and_address_spaces(shape: tuple[int, int, int, int]) -> None:
    heads, kv_heads, dim, width = shape
    keys = mx.zeros((1, kv_heads, 3000, dim), mx.bfloat16)
    queries = mx.zeros((1, heads, width, dim), mx.bfloat16)
    sinks = mx.zeros((heads,), mx.bfloat16)
    layouts = geometries(heads, kv_heads, dim, width)
    for geometry in (layouts[0], layouts[-1]):
        laid = plan(queries.shape, keys.shape, geometry)

        def call(factory: Any, geometry: Geometry = geometry) -> mx.array:
            return attend(queries, keys, keys, 1.0, "causal", sinks, geometry=geometry, factory=factory)

        launches = shim.captured(call)
        assert len(launches) == 2
        found = [gates.resources(each) for each in launches]
        assert not [excess for each in found for excess in each.excess()]
        assert geometry.memory(dim, laid.fragments) <= found[0].threadgroup_bytes
        assert found[0].threadgroup_bytes <= geometry.memory(dim, laid.fragments) + 16


# what is taken -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "width", "mask"),
    [
        (mx.float32, 64, 4, 2, None),
        (mx.float16, 72, 4, 2, None),
        (mx.float16, 64, 34, 2, None),
        (mx.float16, 64, 5, 2, None),
        (mx.float16, 64, 4, 17, None),
        (mx.float16, 64, 4, 2, mx.zeros((2, 20))),
        (mx.float16, 64, 4, 2, "bidirectional"),
    ],
    ids=["float32", "head size", "heads of a group", "uneven groups", "queries", "numbers", "name"],
)
def test_other_calls_are_not_taken(dtype: mx.Dtype, dim: int, heads: int, width: int, mask: Any) -> None:
    queries, keys = mx.zeros((1, heads, width, dim), dtype), mx.zeros((1, 2, 20, dim), dtype)
    assert not takes(queries, keys, keys, mask, None)
    queries, keys = mx.zeros((1, 4, 2, 64), mx.float16), mx.zeros((1, 2, 20, 64), mx.float16)
    assert takes(queries, keys, keys, "causal", mx.zeros((4,), mx.float16))
    assert not takes(queries, keys, keys[:, :, 1:], "causal", None)
    assert not takes(queries, keys, keys, "causal", mx.zeros((4,)))


def test_a_window_belongs_to_a_causal_mask() -> None:
    queries, keys = mx.zeros((1, 4, 2, 64), mx.float16), mx.zeros((1, 2, 20, 64), mx.float16)
    with pytest.raises(ValueError, match="window: 8"):
        attend(queries, keys, keys, 1.0, None, window=8)


# what the probe asks -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_a_case_is_drawn_launched_and_compared(seed: int) -> None:
    kernel = MetalAttention()
    assert isinstance(kernel, AttentionKernel)
    shape = AttentionShape(6, 2, 64, mx.bfloat16, 90, sinks=seed == 1)
    assert kernel.refusal(shape) is None
    case = kernel.case(shape, 4)
    assert attention_shape(case.shape) == shape
    inputs = kernel.draw(case, seed)
    assert takes(*inputs[:3], inputs.mask, inputs.sinks)
    assert isinstance(inputs.mask, mx.array) == (seed == 1)
    wanted = kernel.reference(inputs)
    assert kernel.tolerance(case) == UNIT[mx.bfloat16]
    geometry = kernel.geometries(case)[0]
    got = shim.run(lambda factory: MetalAttention(factory).launch(inputs, geometry)).value
    for each in (got, kernel.stock(inputs)):
        assert each.dtype == mx.bfloat16
        error = np.abs(np.array(each.astype(mx.float32)) - wanted).max() / np.abs(wanted).max()
        assert error <= (1 if each is got else 4) * kernel.tolerance(case)


def test_the_cases_of_a_check_are_taken() -> None:
    kernel = MetalAttention()
    cases = kernel.check_cases()
    assert {attention_shape(case.shape).head_dim for case in cases} == set(DIMS)
    assert not [case for case in cases if kernel.refusal(attention_shape(case.shape)) is not None]
    assert all(kernel.geometries(case) for case in cases)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (AttentionShape(4, 2, 64, mx.float32, 90), "float32"),
        (AttentionShape(4, 2, 72, mx.float16, 90), "72"),
        (AttentionShape(34, 2, 64, mx.float16, 90), "34 for 2"),
    ],
)
def test_refusals_say_why(shape: AttentionShape, why: str) -> None:
    reason = MetalAttention().refusal(shape)
    assert reason is not None
    assert why in reason


def test_a_text_that_is_no_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="4096x4096"):
        attention_shape("4096x4096-4b-g64-float16")
