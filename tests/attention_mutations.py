"""Mistakes in the Metal attention kernel, and the trials that find them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlx_dspark.kernels.metal_attention.kernel import Geometry
from tests.attention_trials import AttentionTrial
from tests.metal_shim import Mode
from tests.metal_shim.mutations import Mutation

PAIR = Geometry(2, 1, True, 96)
WHOLE = AttentionTrial(6, 2, 64, 5, 60, geometry=PAIR)
SPLIT = replace(WHOLE, length=300)
UNSTAGED = replace(WHOLE, geometry=Geometry(2, 1, False, 96))
HIDDEN = replace(WHOLE, mask="random")
WINDOW = replace(WHOLE, window=21)
PADDED = replace(WHOLE, rows=2, length=80, mask="ragged")
WITHOUT = replace(WHOLE, mask="none")
SINKS = replace(WHOLE, sinks=True)
LOUD = replace(WHOLE, loud=100.0)
BFLOAT = replace(WHOLE, dtype=mx.bfloat16)
PARTED = replace(WHOLE, lay="apart")
LEAVING = replace(WHOLE, heads=2, width=3)
EDGE = replace(WHOLE, width=4, length=50)
BEYOND = replace(WHOLE, kv_heads=1, length=17)
BATCH = replace(WHOLE, rows=2)

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_QUERIES = _BARRIER + "\n\nfor (int tile"
_TOPS = _BARRIER + "\n\n  float kept"
_SHARES = _BARRIER + "\n\n  // This SIMD"
_TOTALS = _BARRIER + "\n\nFEW_QUERIES_UNROLL"


MUTATION_TRIALS = (
    WHOLE,
    SPLIT,
    UNSTAGED,
    HIDDEN,
    WINDOW,
    PADDED,
    WITHOUT,
    SINKS,
    LOUD,
    BFLOAT,
    PARTED,
    LEAVING,
    EDGE,
    BEYOND,
    BATCH,
)


def _by(trial: AttentionTrial, name: str, old: str, new: str, mode: Mode = Mode.PLAIN) -> Mutation:
    return Mutation(name, old, new, MUTATION_TRIALS.index(trial), mode)


def _without(barrier: str, with_: str = "") -> tuple[str, str]:
    return barrier, barrier.replace(_BARRIER, with_)


MUTATIONS = (
    # synchronisation
    Mutation("queries are read before all are staged", *_without(_QUERIES)),
    Mutation("tops are read before all are written", *_without(_TOPS)),
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
    ),
    _by(HIDDEN, "a matrix product of some lanes", "if (simd_any(any)) {", "if (any) {"),
    Mutation(
        "a shuffle of some lanes",
        "top = few_queries::over_row_max(top);",
        "if (fn == 0) top = few_queries::over_row_max(top);",
    ),
    _by(
        LEAVING,
        "lanes that leave before a barrier",
        "float kept[RB];",
        "float kept[RB]; if (first_row + fm >= rows) return;",
    ),
    # what is seen
    Mutation("a key less is seen", "key <= last + query[i]", "key < last + query[i]"),
    Mutation("a key more is seen", "key <= last + query[i]", "key <= last + query[i] + 1"),
    _by(EDGE, "a tile counts as seen too early", "tile + KEYS - 1 <= last", "tile + KEYS - 2 <= last"),
    _by(WINDOW, "a window of one more", "last + query[i] - window;", "last + query[i] - window - 1;"),
    _by(WINDOW, "a window begins late", "last + 1 - window", "last + 2 - window"),
    _by(WINDOW, "a tile counts as within the window", "last + width - 1 - window", "last - window"),
    _by(WITHOUT, "keys past the end are seen", "seen = key < to;", "seen = true;"),
    _by(HIDDEN, "another query's mask", "mask_at[i] + key", "mask_at[0] + key"),
    _by(HIDDEN, "heads share a mask", "mask_strides, batch, head,", "mask_strides, batch, 0,"),
    _by(SPLIT, "the range ends a tile early", "from + share)", "from + share - KEYS)"),
    # addresses
    Mutation(
        "values past the end are read",
        "if (key < to) {\n        const",
        "if (true) {\n        const",
    ),
    Mutation(
        "keys past the end are read", "if (key < to) {\n            const", "if (true) {\n            const"
    ),
    _by(
        BEYOND,
        "keys far past the end are read",
        "if (key < to) {\n            const",
        "if (true) {\n            const",
        Mode.ADDRESS,
    ),
    _by(BATCH, "rows of the batch are one", "batch * strides[0]", "0 * strides[0]"),
    Mutation("a cache without room", "head * strides[1]", "head * strides[2] * 60"),
    _by(PARTED, "dims that are neighbours always", "return strides[3] == 1 && multiples", "return multiples"),
    Mutation(
        "staged queries of other heads",
        "kv_head * group + row / width, row",
        "row / width * kv_heads + kv_head, row",
    ),
    _by(
        UNSTAGED,
        "queries of other heads",
        "kv_head * group + row / width;\n  query",
        "row / width * kv_heads + kv_head;\n  query",
    ),
    Mutation(
        "outputs where heads come first",
        "* width + query[i]) * heads + head)",
        "* heads + head) * width + query[i])",
    ),
    Mutation("rows that are not there are stored", "if (row < rows) {", "if (true) {"),
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
    _by(
        LOUD,
        "a row's largest score of half its lanes",
        "return metal::max(x, metal::simd_shuffle_xor(x, 8));",
        "return x;",
    ),
    _by(SINKS, "the sink is in another base", "float(sinks[head]) * 1.44269504f", "float(sinks[head])"),
    _by(
        BFLOAT,
        "what is stored is no half",
        "T(sums[i][c].thread_elements()[0] * factor)",
        "sums[i][c].thread_elements()[0] * factor",
    ),
    # merging splits
    _by(SPLIT, "splits weigh the same", "sums[c] += kept * parts", "sums[c] += parts"),
    _by(SPLIT, "totals of splits weigh the same", "total += kept * weights", "total += weights"),
    _by(SPLIT, "lanes with tops of their own", "top = simd_max(top);", ""),
    _by(
        SPLIT, "rows of splits are mixed up", "return long(split) * rows + row;", "return long(row) + split;"
    ),
    # traffic
    Mutation(
        "the last value is read again and again",
        "const int key = tile + at + fm;",
        "const int key = metal::min(tile + at + fm, to - 1);",
        mode=Mode.TRAFFIC,
    ),
    _by(PADDED, "values that nobody sees are read", "if (simd_any(alive)) {", "if (true) {", Mode.TRAFFIC),
)
