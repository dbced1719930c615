"""Laws of the CUDA small-M product, run on a CPU: it is the product in float32, it reads each weight once,
and a row has the same bits in any company."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_small_m import geometry
from mlx_dspark.kernels.cuda_small_m.cases import BITS, GROUPS, HALVES
from mlx_dspark.kernels.cuda_small_m.experts import CudaSmallMExperts
from mlx_dspark.kernels.cuda_small_m.geometry import LAST, SHARED, Geometry, ways
from mlx_dspark.kernels.cuda_small_m.kernel import CudaSmallM, product
from mlx_dspark.kernels.framework.kernel import Case, ExpertsKernel, MatrixKernel
from mlx_dspark.kernels.framework.shapes import MatrixShape
from tests.cuda_shim.kernels import CpuKernels

BLOCKS = 2


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a block takes several tiles."""
    monkeypatch.setattr(geometry, "MULTIPROCESSORS", BLOCKS)


def errors(kernels: CpuKernels, shape: MatrixShape, rows: int, launch: Geometry) -> float:
    """The largest error in units of the last place of the largest output; infinite where weights were not
    read exactly once."""
    kernel = CudaSmallM(kernels)
    case = Case(str(shape), rows)
    inputs = kernel.draw(case, rows)
    got = np.array(kernel.launch(inputs, launch).astype(mx.float32))
    if kernels.most_reads != 1 or kernels.pieces * 16 != inputs.source.weight.nbytes:
        return np.inf
    wanted = kernel.reference(inputs)
    error = np.abs(got - wanted).max() / np.abs(wanted).max() / kernel.tolerance(case)
    return float(error) if np.isfinite(error) else np.inf


FORMS = [(bits, group, kind) for bits in BITS for group in GROUPS for kind in HALVES]
LAUNCHES = [
    Geometry(1, 2, 3, 1, 1),
    Geometry(2, 4, 2, 2, 1),
    LAST,
    Geometry(4, 2, 3, 1, 1),
    Geometry(1, 3, 4, 4, 1, steady=False),
    Geometry(2, 2, 3, 4, 1, hold=True),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}b-g{form[1]}-{form[2]}")
def test_the_product_is_that_of_float32_and_reads_each_weight_once(
    form: tuple[int, int, mx.Dtype], tmp_path: Path
) -> None:
    bits, group, kind = form
    number = FORMS.index(form)
    launch, rows = LAUNCHES[number % len(LAUNCHES)], ((1, 3, 8), (9, 16))[number % 2]
    kernels = CpuKernels(tmp_path)
    matrices = ((70, 2 * group + 32 * (group == 32)), (16, group), (133, 9 * group))
    for outputs, inputs in matrices:
        for width in rows:
            assert errors(kernels, MatrixShape(outputs, inputs, bits, group, kind), width, launch) < 0.55


def test_a_row_has_the_same_bits_in_any_company_and_launch(tmp_path: Path) -> None:
    kernels = CpuKernels(tmp_path)
    kernel = CudaSmallM(kernels)
    shape = MatrixShape(50, 640, 4, 64, mx.bfloat16)
    inputs = kernel.draw(Case(str(shape), 16), 0)
    whole = kernel.launch(inputs, Geometry(1, 2, 3, 1, 1))
    for rows in (1, 2, 7, 8, 9, 15):
        some = kernel.launch(inputs._replace(x=mx.contiguous(inputs.x[:rows])), Geometry(1, 2, 3, 1, 1))
        assert mx.array_equal(some, whole[:rows]), rows
    for launch in (
        Geometry(2, 2, 3, 1, 1),
        Geometry(1, 2, 2, 1, 3, steady=False),
        Geometry(1, 2, 3, 1, 1, hold=True),
    ):
        for rows in (16, 5):
            some = kernel.launch(inputs._replace(x=mx.contiguous(inputs.x[:rows])), launch)
            assert mx.array_equal(some, whole[:rows]), (launch, rows)


def test_leading_axes_stay(tmp_path: Path) -> None:
    kernel = CudaSmallM(CpuKernels(tmp_path))
    inputs = kernel.draw(Case(str(MatrixShape(20, 64, 8, 64, mx.float16)), 6), 0)
    flat = kernel.launch(inputs, LAST)
    deep = kernel.launch(inputs._replace(x=inputs.x.reshape(2, 3, 64)), LAST)
    assert deep.shape == (2, 3, 20)
    assert mx.array_equal(deep.reshape(6, 20), flat)


CHANGES = {
    "keeps the offset of codes": (" - Codes<BITS, T>::OFFSET * s", ""),
    "takes scales for biases": ("const unsigned*>(from + 16 * PART)", "const unsigned*>(from)"),
    "takes a neighbour's scale": ("half_of<T>(scale[r][h], j & 1)", "half_of<T>(scale[r][h], 0)"),
    "waits for one copy less": ("arrived<STAGES - 1>();", "arrived<STAGES>();"),
    "copies over what is in use": ("copy_ahead(slot == 0 ? STAGES - 1 : slot - 1);", "copy_ahead(slot);"),
    "turns the codes round": ("words[0] >> (4 * i - 4)", "words[0] >> (12 - 4 * i)"),
    "leaves x in its order": ("x.x, x.z, 0x5410", "x.x, x.y, 0x5410"),
    "reads past the end of a row": ("n < N && byte < row_bytes);", "n < N);"),
    "reads past the last row": ("n < N && byte < row_bytes);", "byte < row_bytes);"),
    "leaves out a warp": ("for (int w = 0; w < WARPS; w++)", "for (int w = 1; w < WARPS; w++)"),
    "sums before all have come": ("__syncthreads();\nconst Part part", "const Part part"),
    "skips a tile": ("ahead_tile += gridDim.x;", "ahead_tile += 1;"),
    "reads another lane's x": ("(size_t)g * K + 8 * t;", "(size_t)g * K + 4 * t;"),
    "stores a row twice": ("(i >> 1 & 1) * 8 + g", "g"),
    "takes the scales of another share": ("const int group = share * COUNT", "const int group = share"),
    "takes the scales of another chunk": ("(chunk % SPAN) * GROUPS * 2", "(chunk % SPAN) * GROUPS"),
}


HELD = {
    "holds x in its order": ("make_uint4(b[0], b[1], b[2], b[3])", "eight"),
    "takes the sums of another group": ("(chunk * GROUPS + j) * NT + n", "chunk * GROUPS * NT + n"),
    "takes the sums of other rows": (
        "total[n][0] = two.x, total[n][1] = two.y;",
        "total[n][0] = total[n][1] = two.x;",
    ),
    "adds one group less up": ("i < NT * (shares * SHARE / GROUP)", "i < NT * (K / GROUP - 1)"),
    "begins in the middle of a group": ("add_up(total, b, u == 0);", "add_up(total, b, true);"),
    "lets others see no sums": (
        "make_float2(total[0], total[1]);\n}\n__syncthreads();",
        "make_float2(total[0], total[1]);\n}",
    ),
    "puts sums where x is": ("held + NT * shares * SHARE", "held"),
}


TOGETHER = {
    "takes the first matrix for the second": (
        "reinterpret_cast<const unsigned char*>(weights_1)",
        "weight_bytes",
    ),
    "takes the first scales for the second": (
        "lane < 16 ? scales_1 : biases_1",
        "lane < 16 ? scales : biases",
    ),
    "begins the third too late": ("tile - tiles_0 - tiles_1};", "tile - tiles_0};"),
    "ends the second like the first": ("y_1, weights_1_shape[0],", "y_1, N,"),
    "leaves out the last matrix": (
        "tiles_0 + tiles_1 + (weights_2_shape[0] + ROWS - 1) / ROWS",
        "tiles_0 + tiles_1",
    ),
    "copies of the first only": (
        "const Part part = part_of(of_all);",
        "const Part part = part_of(of_all % 3);",
    ),
}


def together(
    kernels: CpuKernels, form: tuple[int, int, mx.Dtype], outputs: tuple[int, ...], rows: int
) -> bool:
    """Whether several matrices by one launch are what each is by itself, and every weight was read once."""
    bits, group, kind = form
    kernel, launch = CudaSmallM(kernels), Geometry(1, 2, 3, 2, 1)
    shapes = [MatrixShape(each, 3 * group + 64, bits, group, kind) for each in outputs]
    sources = [shape.draw(seed) for seed, shape in enumerate(shapes)]
    x = shapes[0].draw_rows(rows, 5).reshape(1, rows, -1)
    made = kernel.multiply_together(x, sources, launch)
    once = kernels.most_reads == 1 and kernels.pieces * 16 == sum(each.weight.nbytes for each in sources)
    alone = [kernel.multiply(x, source, launch) for source in sources]
    return once and all(mx.array_equal(one, other) for one, other in zip(made, alone, strict=True))


@pytest.mark.parametrize(
    ("form", "outputs", "rows"),
    [((4, 64, mx.bfloat16), (16, 130, 20), 1), ((8, 32, mx.float16), (70, 33), 9)],
    ids=["three", "two"],
)
def test_matrices_multiplied_together_are_as_each_by_itself(
    form: tuple[int, int, mx.Dtype], outputs: tuple[int, ...], rows: int, tmp_path: Path
) -> None:
    assert together(CpuKernels(tmp_path), form, outputs, rows)


@pytest.mark.parametrize("change", TOGETHER.values(), ids=TOGETHER.keys())
def test_a_change_for_the_worse_of_several_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    same = False
    with suppress(AssertionError):
        same = together(CpuKernels(tmp_path, change), (4, 64, mx.bfloat16), (40, 100, 20), 3)
    assert not same


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_for_the_worse_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    kernels = CpuKernels(tmp_path, change)
    told = ""
    found = 0.0
    try:
        found = errors(kernels, MatrixShape(100, 704, 4, 64, mx.float16), 5, Geometry(1, 2, 3, 2, 1))
    except AssertionError as error:
        told = str(error)
    assert found > 1 or "leaves shared memory" in told or "parted" in told


@pytest.mark.parametrize("change", HELD.values(), ids=HELD.keys())
def test_a_change_for_the_worse_of_what_is_held_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    found = np.inf
    with suppress(AssertionError):
        launch = Geometry(1, 3, 3, 2, 1, hold=True)
        found = errors(CpuKernels(tmp_path, change), MatrixShape(100, 704, 4, 64, mx.float16), 11, launch)
    assert found > 1


def test_what_is_compiled_is_named_by_its_text() -> None:
    """MLX keeps compiled kernels on disk by name."""
    names = []

    def factory(*, name: str, header: str, **form: object) -> object:
        names.append((name, header.replace(name, "")))
        return lambda **call: [mx.zeros(1)]

    for bits in BITS:
        for dtype in HALVES:
            x, scales = mx.zeros((1, 64), dtype), mx.zeros((8, 1), dtype)
            for launch in (LAST, Geometry(1, 4, 2, 2, 2), Geometry(2, 4, 2, 1, 1)):
                source = Source(8, 64, mx.zeros((8, 2 * bits), mx.uint32), scales, scales, bits, 64, "affine")
                product(x, source, launch, factory)
    assert len({name for name, _ in names}) == len({header for _, header in names}) == len(names)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("matrix", [(576, 576), (192, 576), (49152, 576), (4096, 12288), (151936, 4096)])
def test_launches_fit_and_add_in_one_order_for_every_number_of_rows(
    bits: int, matrix: tuple[int, int]
) -> None:
    shape = MatrixShape(*matrix, bits, 32, mx.bfloat16)
    orders = set()
    for rows in range(1, 17):
        found = ways(shape, rows)
        assert 1 < len(found) <= 4
        assert found[-1] == min(
            found, key=lambda each: (each.shared_bytes(shape, -(-rows // 8)), each.resident)
        )
        orders |= {each.order for each in found}
        for each in found:
            assert each.resident * (each.shared_bytes(shape, -(-rows // 8)) + 1024) <= SHARED
            assert each.threads <= 1024
    assert len(orders) == 1


def test_it_is_a_kernel_of_the_framework(tmp_path: Path) -> None:
    kernel: MatrixKernel = CudaSmallM(CpuKernels(tmp_path))
    assert isinstance(kernel, MatrixKernel)
    drawn = kernel.draw(Case("24x64-4b-g64-float16", 2), 0)
    assert kernel.case(drawn.source, mx.float16, 2) == Case("24x64-4b-g64-float16", 2)
    assert mx.array_equal(kernel.multiply(drawn.x, drawn.source, LAST), kernel.launch(drawn, LAST))
    assert all(kernel.geometries(case) for case in CudaSmallM().check_cases())


@pytest.mark.parametrize("bits", BITS)
def test_rows_sorted_by_expert_read_an_expert_once_for_eight_of_them(bits: int, tmp_path: Path) -> None:
    kernels = CpuKernels(tmp_path)
    kernel: ExpertsKernel = CudaSmallMExperts(kernels)
    assert isinstance(kernel, ExpertsKernel)
    case = Case(f"e5-40x96-{bits}b-g32-bfloat16", 20)
    drawn = kernel.draw(case, 0)
    for counts in ((20, 0, 0, 0, 0), (1, 8, 0, 9, 2), (4, 4, 4, 4, 4), (0, 0, 17, 1, 2)):
        inputs = drawn._replace(experts=mx.array(np.repeat(np.arange(5), counts).astype(np.uint32)))
        got = np.array(kernel.launch(inputs, Geometry(1, 2, 2, 1, 1)).astype(mx.float32))
        wanted = kernel.reference(inputs)
        assert np.abs(got - wanted).max() < 0.55 * kernel.tolerance(case) * np.abs(wanted).max()
        pieces = drawn.source.weight[0].nbytes // 16
        assert kernels.pieces == pieces * sum(count > 0 for count in counts)
        assert kernels.most_reads == max(-(-count // 8) for count in counts)


def test_other_matrices_are_refused() -> None:
    weight, scales, small = (
        mx.zeros((8, 8), mx.uint32),
        mx.zeros((8, 1), mx.float16),
        mx.zeros((8, 4), mx.uint8),
    )
    good = Source(8, 64, weight, scales, scales, 4, 64, "affine")
    kernel = CudaSmallM()
    assert kernel.refusal(good, mx.float16) is None
    assert "float32" in (kernel.refusal(good, mx.float32) or "")
    assert "scales" in (kernel.refusal(good, mx.bfloat16) or "")
    assert kernel.refusal(Source(8, 64, weight), mx.float16)
    assert kernel.refusal(Source(8, 64, weight, small, None, 4, 16, "nvfp4"), mx.float16)
    assert kernel.refusal(Source(8, 64, weight, scales, scales, 2, 64, "affine"), mx.float16)
    many = Source(8, 64, weight[None], scales[None], scales[None], 4, 64, "affine")
    assert kernel.refusal(many, mx.float16)
    assert CudaSmallMExperts().refusal(good, mx.float16)
    assert CudaSmallMExperts().refusal(many, mx.float16) is None
