"""Trials of the Metal small-M kernel in the shim, and mistakes that they must find."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.rows import Rows
from mlx_dspark.kernels.framework.shapes import MatrixShape
from mlx_dspark.kernels.metal_small_m.cases import SmallMGeometry
from mlx_dspark.kernels.metal_small_m.kernel import MetalSmallM, MetalSmallMExperts
from tests import metal_shim as shim
from tests.metal_shim.capture import Change
from tests.metal_shim.mutations import Mutation

SMALLEST = SmallMGeometry(2, 2, "float32")
_FRACTION = {mx.float16: 10, mx.bfloat16: 7}
_NOISE = 1e-5
"""Of sums in float32 in another order, as a share of the largest output."""


@dataclass(frozen=True)
class SmallMTrial:
    """One case in one layout. Called, it runs the kernel in the shim and says what is wrong."""

    shape: str
    rows: int
    geometry: SmallMGeometry = SMALLEST

    @property
    def case(self) -> Case:
        return Case(self.shape, self.rows)

    def __call__(self, schedule: str, mode: shim.Mode, change: Change | None = None) -> str | None:
        ran = self.ran(schedule, mode, change)
        if (wrong := self.wrong(ran.value)) is not None:
            return wrong
        return self.read_again(ran.launches[0]) if mode is shim.Mode.TRAFFIC else None

    def ran(self, schedule: str, mode: shim.Mode = shim.Mode.PLAIN, change: Change | None = None) -> shim.Run:
        return shim.run(self.call, schedule, seed=7, mode=mode, change=change)

    def call(self, metal_kernel: Any) -> mx.array:
        return kernel_of(self.case, metal_kernel).launch(drawn(self.case), self.geometry)

    def launch(self) -> shim.Launch:
        return shim.captured(self.call)[0]

    def wrong(self, result: mx.array) -> str | None:
        """Operands in float32 give a float32 sum, rounded once; in halves what the kernel promises."""
        got, wanted = np.array(result.astype(mx.float32)), expected(self.case)
        off, most = np.abs(got - wanted), np.abs(wanted).max()
        if self.geometry.operand == "float32":
            off = off - _NOISE * most
            allowed = 0.5 * _ulps(wanted, _FRACTION[result.dtype])
        else:
            allowed = np.full_like(wanted, MetalSmallM().tolerance(self.case) * most)
        if (off <= allowed).all():
            return None
        at = np.unravel_index(np.argmax(np.nan_to_num(off / allowed, nan=np.inf)), off.shape)
        return f"{got[at]} at {tuple(map(int, at))}, not {wanted[at]}"

    def read_again(self, ran: shim.Ran) -> str | None:
        """Weights are loaded once, scales and biases once by every threadgroup; of experts, those with rows,
        once for every 8 of them."""
        shape, experts = MatrixShape.parse(self.shape), drawn(self.case).experts
        counts = [8] if experts is None else np.bincount(np.array(experts), minlength=shape.experts).tolist()
        times = sum(-(-count // 8) for count in counts)
        weights = ran.traffic["w"]
        if weights.loaded * len(counts) != weights.size * times:
            return f"{weights.loaded} bytes of {weights.size} of weights were loaded"
        for each in (ran.traffic["scales"], ran.traffic["biases"]):
            if each.by_threadgroups * len(counts) != each.size * times:
                return f"{each.by_threadgroups} bytes of {each.size} of scales or biases were loaded"
        return None


@cache
def drawn(case: Case) -> Rows:
    return kernel_of(case).draw(case, seed=3)


def kernel_of(case: Case, metal_kernel: Any = None) -> MetalSmallM:
    made = MetalSmallMExperts if MatrixShape.parse(case.shape).experts else MetalSmallM
    return made(metal_kernel)


@cache
def expected(case: Case) -> NDArray[np.float32]:
    return kernel_of(case).reference(drawn(case))


def _ulps(values: NDArray[np.float32], fraction: int) -> NDArray[np.float32]:
    """A unit in the last place of each value, of numbers with so many bits after the first."""
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(values), 2.0**-14))) - fraction)


MUTATION_TRIALS = (
    SmallMTrial("43x160-4b-g32-float16", 5),
    SmallMTrial("33x160-3b-g32-bfloat16", 13),
    SmallMTrial("e4-11x96-4b-g32-float16", 36),
)

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MUTATIONS = (
    Mutation("no barrier before the sums are added", BARRIER, ""),
    Mutation(
        "a barrier that orders no memory",
        BARRIER,
        BARRIER.replace("threadgroup)", "none)"),
        mode=shim.Mode.THREAD,
    ),
    Mutation("a barrier of the simdgroup only", "threadgroup_barrier(", "simdgroup_barrier("),
    Mutation("threads past the last row leave", BARRIER, f"if (first + lane >= N) return; {BARRIER}"),
    Mutation("rows of x that are not there", "m < M && x_at < K", "x_at < K"),
    Mutation("numbers of x past a row's end", "m < M && x_at < K", "m < M"),
    Mutation("weight rows that are not there", "n < N && w_at < K", "w_at < K"),
    Mutation("weights past a row's end", "n < N && w_at < K", "n < N"),
    Mutation("outputs past a row's end", "m < M && n < N", "m < M"),
    Mutation("rows of outputs that are not there", "m < M && n < N", "n < N"),
    Mutation("sums stored by row", "ulong2(0, 0), true", "ulong2(0, 0), false"),
    Mutation("one group for a block", "uint(w_at) / GROUP", "uint(block) / GROUP"),
    Mutation("groups of one row for all", "uint(first_w + n) * row_groups + ", ""),
    Mutation("row of x by the lane's row", "8 * j + column + r", "8 * j + row + r"),
    Mutation("one row of x twice", "8 * j + column + r", "8 * j + column"),
    Mutation("too little room for sums", "partial[KS * TM * TN]", "partial[KS * TM * TN - 8]"),
    Mutation("simdgroups share their room", "worker * TM * TN + 8", "8"),
    Mutation(
        "a sum rounded on the way",
        "sum += partial[s * TM * TN + at]",
        "sum = T(sum + partial[s * TM * TN + at])",
    ),
    Mutation(
        "weights rounded to the type of x", "OPERAND(metal::fma(", "OPERAND(T(1)) * T(metal::fma(", trial=1
    ),
    Mutation("sums that start as nothing", "metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f)", "{}"),
    Mutation(
        "products of some lanes",
        "for (int t = 0; t < 8; ++t) {\n      metal",
        "for (int t = 0; t < 8; ++t) if (w_at < K) {\n      metal",
    ),
    Mutation("no conversion to the output", "T(sum)", "sum", trial=1),
    Mutation("the first simdgroup's sum is lost", "int s = 0; s < KS", "int s = 1; s < KS"),
    Mutation("all blocks for every simdgroup", "block += KS * BLOCK", "block += BLOCK"),
    Mutation("no block that is not whole", "block < K;", "block + BLOCK <= K;"),
    Mutation("low numbers for high ones", "float(high[t])", "float(low[t])"),
    Mutation("codes without their lowest bit", "(1u << BITS) - 1", "(1u << BITS) - 2"),
    Mutation("codes in another order", "(8 * e + t) * BITS", "(2 * t + e) * BITS"),
    Mutation("codes over two words lose bits", "bit % UNIT + BITS > UNIT", "false", trial=1),
    Mutation("codes over two words shifted wrongly", "<< (UNIT - bit % UNIT)", "<< (bit % UNIT)", trial=1),
    Mutation(
        "a code read past the lane's last",
        "bit % UNIT + BITS > UNIT",
        "bit % UNIT + BITS >= UNIT",
        mode=shim.Mode.ADDRESS,
    ),
    Mutation("codes of the lane before", "uint(w_at) / 16 * UNITS", "uint(w_at) / 32 * UNITS"),
    Mutation("no bias", "metal::fma(scale, float(code & MASK), bias)", "scale * float(code & MASK)"),
    Mutation("scales for biases", "float(biases[group])", "float(scales[group])"),
    Mutation("outputs written by several threads", "at += 32 * KS", "at += 32", mode=shim.Mode.THREAD),
    Mutation(
        "the last weight row again for those past it",
        "= first + 8 * i + row",
        "= metal::min(first + 8 * i + row, N - 1)",
        mode=shim.Mode.TRAFFIC,
    ),
    Mutation("matrices of another expert", "expert * N", "0", trial=2),
    Mutation("rows of the next expert too", " && experts[first_x + M] == expert", "", trial=2),
    Mutation("more rows of an expert are left", "before % TM != 0", "before != 0", trial=2),
    Mutation("every row begins anew", "before % TM != 0", "false", trial=2, mode=shim.Mode.TRAFFIC),
    Mutation("an expert past the last row", " && first_x + M < x_shape[0]", "", trial=2),
    Mutation("rows counted from the first", "(first_x + m) * K", "m * K", trial=2),
    Mutation("outputs counted from the first", "(first_x + m) * N", "m * N", trial=2),
)
