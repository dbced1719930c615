"""Changes for the worse of the attention kernel. Each must be noticed, by its call in its mode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_dspark.kernels.metal_attention.kernel import Geometry
from tests.metal_shim.attention import Call, overread
from tests.metal_shim.capture import Change
from tests.metal_shim.compiling import Mode
from tests.metal_shim.errors import ShimError
from tests.metal_shim.running import SCHEDULES

PAIR = Geometry(2, 1, True, 96)
WHOLE = Call(6, 2, 64, 5, 60, geometry=PAIR)
SPLIT = replace(WHOLE, length=300)
UNSTAGED = replace(WHOLE, geometry=Geometry(2, 1, False, 96))
HIDDEN = replace(WHOLE, mask="random")
WINDOW = replace(WHOLE, window=21)
PADDED = replace(WHOLE, rows=2, length=80, mask="ragged")
WITHOUT = replace(WHOLE, mask="none")
SINKS = replace(WHOLE, sinks=True)
LOUD = replace(WHOLE, loud=100.0)
BFLOAT = replace(WHOLE, dtype=mx.bfloat16)

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_QUERIES = _BARRIER + "\n\nfor (int tile"
_TOPS = _BARRIER + "\n\n  float kept"
_SHARES = _BARRIER + "\n\n  // This SIMD"
_TOTALS = _BARRIER + "\n\nFEW_QUERIES_UNROLL"


@dataclass(frozen=True)
class Mutation:
    """Replaces `old`, which is there once, by `new`. `quick` ones are part of every test run."""

    name: str
    old: str
    new: str
    call: Call = WHOLE
    mode: Mode = Mode.PLAIN
    quick: bool = False

    @property
    def change(self) -> Change:
        return self.old, self.new

    def noticed(self) -> str | None:
        """What noticed it; None where nothing did. Runs until then, in one schedule after the other."""
        schedules = SCHEDULES if self.mode is Mode.PLAIN else SCHEDULES[:1]
        for seed, schedule in enumerate(schedules):
            try:
                error, ran = self.call.run(schedule, self.mode, self.change, seed)
            except ShimError as fault:
                return f"{type(fault).__name__}, {schedule}: {str(fault)[:200]}"
            if not error <= 1:
                return f"{error:.3g} units, {schedule}"
            if self.mode is Mode.TRAFFIC and (more := overread(self.call, ran)):
                return more
        return None


def _without(barrier: str, with_: str = "") -> tuple[str, str]:
    return barrier, barrier.replace(_BARRIER, with_)


MUTATIONS = (
    # synchronisation
    Mutation("queries are read before all are staged", *_without(_QUERIES), quick=True),
    Mutation("tops are read before all are written", *_without(_TOPS), quick=True),
    Mutation("shares are read before all are written", *_without(_SHARES)),
    Mutation("totals are read before all are written", *_without(_TOTALS)),
    Mutation(
        "a SIMD group's barrier where SIMD groups meet",
        *_without(_SHARES, "simdgroup_barrier(mem_flags::mem_threadgroup);"),
    ),
    Mutation(
        "a barrier that orders no memory",
        *_without(_TOPS, "threadgroup_barrier(mem_flags::mem_none);"),
        mode=Mode.THREAD,
        quick=True,
    ),
    Mutation("a matrix product of some lanes", "if (simd_any(any)) {", "if (any) {", HIDDEN, quick=True),
    Mutation(
        "a shuffle of some lanes",
        "top = few_queries::over_row_max(top);",
        "if (fn == 0) top = few_queries::over_row_max(top);",
    ),
    Mutation(
        "lanes that leave before a barrier",
        "float kept[RB];",
        "float kept[RB]; if (first_row + fm >= rows) return;",
        replace(WHOLE, heads=2, width=3),
    ),
    # what is seen
    Mutation("a key less is seen", "key <= last + query[i]", "key < last + query[i]"),
    Mutation("a key more is seen", "key <= last + query[i]", "key <= last + query[i] + 1"),
    Mutation(
        "a tile counts as seen too early",
        "tile + KEYS - 1 <= last",
        "tile + KEYS - 2 <= last",
        replace(WHOLE, width=4, length=50),
        quick=True,
    ),
    Mutation("a window of one more", "last + query[i] - window;", "last + query[i] - window - 1;", WINDOW),
    Mutation("a window begins late", "last + 1 - window", "last + 2 - window", WINDOW),
    Mutation(
        "a tile counts as within the window", "last + width - 1 - window", "last - window", WINDOW, quick=True
    ),
    Mutation("keys past the end are seen", "seen = key < to;", "seen = true;", WITHOUT),
    Mutation("another query's mask", "mask_at[i] + key", "mask_at[0] + key", HIDDEN),
    Mutation("heads share a mask", "mask_strides, batch, head,", "mask_strides, batch, 0,", HIDDEN),
    Mutation("the range ends a tile early", "from + share)", "from + share - KEYS)", SPLIT),
    # addresses
    Mutation(
        "values past the end are read",
        "if (key < to) {\n        const",
        "if (true) {\n        const",
        quick=True,
    ),
    Mutation(
        "keys past the end are read", "if (key < to) {\n            const", "if (true) {\n            const"
    ),
    Mutation(
        "keys far past the end are read",
        "if (key < to) {\n            const",
        "if (true) {\n            const",
        replace(WHOLE, kv_heads=1, length=17),
        Mode.ADDRESS,
    ),
    Mutation("rows of the batch are one", "batch * strides[0]", "0 * strides[0]", replace(WHOLE, rows=2)),
    Mutation("a cache without room", "head * strides[1]", "head * strides[2] * 60"),
    Mutation(
        "dims that are neighbours always",
        "return strides[3] == 1 && multiples",
        "return multiples",
        replace(WHOLE, lay="apart"),
        quick=True,
    ),
    Mutation(
        "staged queries of other heads",
        "kv_head * group + row / width, row",
        "row / width * kv_heads + kv_head, row",
    ),
    Mutation(
        "queries of other heads",
        "kv_head * group + row / width;\n  query",
        "row / width * kv_heads + kv_head;\n  query",
        UNSTAGED,
    ),
    Mutation(
        "outputs where heads come first",
        "* width + query[i]) * heads + head)",
        "* heads + head) * width + query[i])",
    ),
    Mutation("rows that are not there are stored", "if (row < rows) {", "if (true) {", quick=True),
    Mutation("a row of keys for another lane", "d + U * fm, k_strides", "d + U * fn, k_strides"),
    Mutation("queries of the next dim", "dims[U + t];", "dims[t + 1];"),
    Mutation(
        "columns of another lane",
        "(8 * simd + fn) * COLUMNS;\n        few",
        "(8 * simd + fm) * COLUMNS;\n        few",
    ),
    Mutation("staged rows overlap", "QUERY = D / 4 + 1", "QUERY = D / 4 - 1"),
    Mutation(
        "no room for the tops of all SIMD groups",
        "tops[SG * ROWS];",
        "tops[SG * ROWS - 4];",
        mode=Mode.ADDRESS,
    ),
    Mutation("more memory than there is", "SHARE = KEYS / 2 + 2", "SHARE = KEYS / 2 + 2000"),
    # softmax
    Mutation("sums are not rescaled", "thread_elements()[0] *= kept[i];", "thread_elements()[0] *= 1.0f;"),
    Mutation("totals are not rescaled", "totals[i] *= kept[i];", ""),
    Mutation(
        "sums begin with what was there",
        "sums[i][c] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);",
        ";",
    ),
    Mutation(
        "one SIMD group's total", "for (int s = 0; s < SG; ++s) total", "for (int s = 0; s < 1; ++s) total"
    ),
    Mutation("a total of half its lanes", "return x + metal::simd_shuffle_xor(x, 8);", "return x;"),
    Mutation(
        "a row's largest score of half its lanes",
        "return metal::max(x, metal::simd_shuffle_xor(x, 8));",
        "return x;",
        LOUD,
    ),
    Mutation("the sink is in another base", "float(sinks[head]) * 1.44269504f", "float(sinks[head])", SINKS),
    Mutation(
        "what is stored is no half",
        "T(sums[i][c].thread_elements()[0] * factor)",
        "sums[i][c].thread_elements()[0] * factor",
        BFLOAT,
    ),
    # merging splits
    Mutation("splits weigh the same", "sums[c] += kept * parts", "sums[c] += parts", SPLIT),
    Mutation("totals of splits weigh the same", "total += kept * weights", "total += weights", SPLIT),
    Mutation("lanes with tops of their own", "top = simd_max(top);", "", SPLIT, quick=True),
    Mutation(
        "rows of splits are mixed up", "return long(split) * rows + row;", "return long(row) + split;", SPLIT
    ),
    # traffic
    Mutation(
        "the last value is read again and again",
        "const int key = tile + at + fm;",
        "const int key = metal::min(tile + at + fm, to - 1);",
        mode=Mode.TRAFFIC,
        quick=True,
    ),
    Mutation(
        "values that nobody sees are read", "if (simd_any(alive)) {", "if (true) {", PADDED, Mode.TRAFFIC
    ),
)
