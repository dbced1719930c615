"""Laws of the Metal small-M kernel, run on a CPU: a product in float32, of weights that are read once."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.kernel import Checked, ExpertsKernel, MatrixKernel
from mlx_dspark.kernels.framework.shapes import MatrixShape
from mlx_dspark.kernels.metal_small_m.cases import BITS, GROUPS, HALVES, SmallMGeometry
from mlx_dspark.kernels.metal_small_m.kernel import WIDTHS, MetalSmallM, MetalSmallMExperts
from tests import metal_shim as shim
from tests.metal_shim import gates, mutations
from tests.small_m_trials import MUTATION_TRIALS, MUTATIONS, SmallMTrial

SIZES = ((43, 160), (8, 96), (1, 256))
"""Outputs and inputs: no whole tiles, less than a tile, one row; none is a whole number of blocks for all."""


def fitting(inputs: int, group: int) -> int:
    return -(-inputs // group) * group


def trials(bits: int, group: int, dtype: str, rows: tuple[int, ...]) -> list[SmallMTrial]:
    return [
        SmallMTrial(f"{outputs}x{fitting(inputs, group)}-{bits}b-g{group}-{dtype}", count)
        for (outputs, inputs), count in zip(SIZES, rows, strict=True)
    ]


FORMS = [(bits, group, dtype) for bits in (2, 4, 8) for group in GROUPS for dtype in ("float16", "bfloat16")]
FORMS += [(bits, 64, "bfloat16") for bits in (1, 3, 5, 6)]
FORMS += [(bits, 32, "float16") for bits in (1, 3, 5, 6)]


@pytest.mark.parametrize(("bits", "group", "dtype"), FORMS)
def test_it_is_the_product_in_every_schedule(bits: int, group: int, dtype: str) -> None:
    wide = (bits + GROUPS.index(group) + (dtype == "float16")) % 2
    rows = (13, 16, 9) if wide else (5, 8, 2)
    for trial in trials(bits, group, dtype, rows):
        for schedule in shim.SCHEDULES:
            assert trial(schedule, shim.Mode.PLAIN) is None, (trial, schedule)


def test_any_number_of_rows_of_a_tile_count_is_one_kernel() -> None:
    for rows in range(1, 17):
        assert SmallMTrial("20x128-4b-g64-float16", rows)("random", shim.Mode.PLAIN) is None, rows


KERNEL = MetalSmallM()
BY_EXPERT = MetalSmallMExperts()
LAID_OUT = [
    SmallMTrial("300x1056-4b-g32-float16", rows, geometry)
    for rows in (8, 16)
    for geometry in KERNEL.geometries(SmallMTrial("300x1056-4b-g32-float16", rows).case)
]


@pytest.mark.parametrize(
    "trial", LAID_OUT, ids=lambda trial: f"{trial.rows}-{'-'.join(map(str, trial.geometry))}"
)
def test_every_layout_is_the_product_within_its_room(trial: SmallMTrial) -> None:
    ran = trial.ran("interleaved")
    assert trial.wrong(ran.value) is None
    launched, geometry = ran.launches[0], trial.geometry
    assert launched.threads == geometry.threads <= 256
    assert launched.threadgroup_bytes == geometry.threadgroup_bytes(trial.rows) <= 32 * 1024


GATED = [trial for trial in LAID_OUT if trial.rows == 16]
GATED += [SmallMTrial(f"64x256-{bits}b-g64-bfloat16", 16, SmallMGeometry(4, 4, "float32")) for bits in BITS]


def test_every_layout_passes_the_gates() -> None:
    for trial in GATED:
        found = gates.resources(trial.launch())
        assert not found.excess(), trial
        assert found.threadgroup_bytes == trial.geometry.threadgroup_bytes(trial.rows)


@pytest.mark.parametrize("bits", BITS)
def test_each_weight_is_read_once_for_all_rows(bits: int) -> None:
    trial = SmallMTrial(f"43x160-{bits}b-g32-float16", 13)
    ran = trial.ran("forward", shim.Mode.TRAFFIC).launches[0]
    assert trial.read_again(ran) is None
    x, y = ran.traffic["x"], ran.traffic["y"]
    assert x.loaded == x.by_threadgroups == 3 * x.size
    assert (y.loaded, y.stored) == (0, y.size)


EXPERTS = [
    SmallMTrial("e4-11x96-4b-g32-float16", 36),
    SmallMTrial("e40-8x128-2b-g128-bfloat16", 64),
    SmallMTrial("e1-43x64-8b-g64-float16", 20, SmallMGeometry(2, 2, "float16")),
]


@pytest.mark.parametrize("trial", EXPERTS, ids=lambda trial: trial.shape)
def test_rows_of_an_expert_share_its_weights(trial: SmallMTrial) -> None:
    for schedule in shim.SCHEDULES:
        assert trial(schedule, shim.Mode.PLAIN) is None
    assert trial("forward", shim.Mode.TRAFFIC) is None
    assert not gates.resources(trial.launch()).excess()


@pytest.mark.parametrize("mode", [shim.Mode.ADDRESS, shim.Mode.THREAD])
@pytest.mark.parametrize(
    "trial",
    [
        SmallMTrial("19x96-4b-g32-float16", 5, SmallMGeometry(2, 4, "float16")),
        SmallMTrial("33x160-3b-g32-bfloat16", 13),
        SmallMTrial("e2-11x96-4b-g32-float16", 12),
    ],
    ids=["4 bits", "3 bits", "experts"],
)
def test_sanitizers_find_nothing(trial: SmallMTrial, mode: shim.Mode) -> None:
    assert trial("forward", mode) is None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mistakes_are_found(mutation: mutations.Mutation) -> None:
    assert mutations.found(mutation, MUTATION_TRIALS[mutation.trial], mutation.mode) is not None


def test_layouts_begin_with_a_guess_and_end_with_what_any_device_takes() -> None:
    for rows in (2, 8, 9, 16):
        found = KERNEL.geometries(SmallMTrial("4096x4096-2b-g128-float16", rows).case)
        assert found[-1].threads == min(each.threads for each in found) == 64
        assert {each.operand for each in found} == {"float32", "float16"}
        assert len(set(found)) == len(found)
    narrow = KERNEL.geometries(SmallMTrial("64x64-4b-g64-bfloat16", 2).case)
    assert {(each.simdgroups, each.operand) for each in narrow} == {(2, "float32")}


@pytest.mark.parametrize(
    ("kernel", "other"), [(KERNEL, BY_EXPERT), (BY_EXPERT, KERNEL)], ids=["one", "experts"]
)
def test_it_is_a_kernel_of_the_framework(kernel: MetalSmallM, other: MetalSmallM) -> None:
    assert isinstance(kernel, MatrixKernel)
    assert isinstance(kernel, Checked)
    assert isinstance(kernel, ExpertsKernel) == (kernel is BY_EXPERT)
    for case in kernel.check_cases():
        shape = MatrixShape.parse(case.shape)
        assert kernel.refusal(shape_only(shape), shape.dtype) is None
        assert other.refusal(shape_only(shape), shape.dtype) is not None
        assert kernel.case(shape_only(shape), shape.dtype, case.width) == case


def test_it_is_offered_for_the_rows_that_it_takes() -> None:
    assert (WIDTHS[0], WIDTHS[-1]) == (2, 16)


def shape_only(shape: MatrixShape) -> Source:
    """A matrix, or those of experts, whose numbers are never made."""
    many = (shape.experts,) if shape.experts else ()
    words, groups = shape.inputs * shape.bits // 32, shape.inputs // shape.group_size
    weight = mx.zeros((*many, shape.outputs, words), mx.uint32)
    scales = mx.zeros((*many, shape.outputs, groups), shape.dtype)
    return Source(shape.outputs, shape.inputs, weight, scales, scales, shape.bits, shape.group_size, "affine")


TAKEN = shape_only(MatrixShape(64, 128, 4, 64, mx.float16))


@pytest.mark.parametrize(
    ("source", "dtype", "said"),
    [
        (replace(TAKEN, mode="mxfp4"), mx.float16, "affine"),
        (replace(TAKEN, biases=None), mx.float16, "affine"),
        (replace(TAKEN, bits=7), mx.float16, "7 bits"),
        (replace(TAKEN, group_size=16), mx.float16, "groups of 16"),
        (replace(TAKEN, weight=TAKEN.weight[None]), mx.float16, "not a matrix"),
        (TAKEN, mx.bfloat16, "scales are"),
        (TAKEN, mx.float32, "scales are"),
        (replace(TAKEN, weight=TAKEN.weight[:1, :4]), mx.float16, "fewer than 8 words"),
        (replace(TAKEN, weight=mx.broadcast_to(mx.array(0), (1 << 15, 1 << 16))), mx.float16, "are counted"),
    ],
)
def test_what_it_does_not_take_is_told(source: Source, dtype: mx.Dtype, said: str) -> None:
    refusal = KERNEL.refusal(source, dtype)
    assert refusal is not None
    assert said in refusal


def test_it_takes_both_halves_and_at_most_sixteen_rows() -> None:
    for dtype in HALVES:
        assert KERNEL.refusal(shape_only(MatrixShape(64, 128, 4, 64, dtype)), dtype) is None
    with pytest.raises(ValueError, match="17 rows"):
        KERNEL.multiply(mx.zeros((17, 128), mx.float16), TAKEN, SmallMGeometry(4, 4, "float32"))
