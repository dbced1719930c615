"""The kernel as a chain: which heads it takes, and that it is right on this device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_common.build import File, templated

THREADS = 256
BLOCKS = 128
"""Most blocks that share a row's vocabulary."""

ROWS = 64
"""Entries of the vocabulary that are worth a block."""

_HALVES = (mx.float16, mx.bfloat16)
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Matrix:
    """A matrix `[outputs, inputs]` as the kernel reads it: halves, or codes with scales and biases."""

    arrays: tuple[mx.array, ...]
    bits: int
    group: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, source: Source | None) -> Matrix | None:
        """None for a form that the kernel does not read."""
        if source is None:
            return None
        if not source.bits:
            if source.weight.dtype not in _HALVES:
                return None
            return cls((source.weight.view(mx.uint32),), 16, source.inputs, source.weight.dtype)
        if source.bits not in (4, 8) or source.biases is None or source.scales is None:
            return None
        if source.mode != "affine" or source.scales.dtype not in _HALVES:
            return None
        arrays = source.weight, source.scales, source.biases
        return cls(arrays, source.bits, source.group_size, source.scales.dtype)

    @property
    def packed(self) -> bool:
        return len(self.arrays) > 1

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of the matrix in float32, by MLX's own operations."""
        if not self.packed:
            return self.arrays[0][ids].view(self.dtype).astype(mx.float32)
        words, scales, biases = (each[ids] for each in self.arrays)
        wide = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(words, *wide, self.group, self.bits)


@dataclass(frozen=True)
class GreedyChain:
    """Draft `i` is the best of `base[i] + project @ table[draft i - 1]`, the first after the anchor.

    `table` `[vocab, rank]` is indexed by target ids; `project` `[draft_vocab, rank]`; `ids` `[draft_vocab]`
    int32 are the target ids of drafts, None where they are the same.
    """

    table: Matrix
    project: Matrix
    rank: int
    ids: mx.array | None

    @classmethod
    def of(cls, table: Source | None, project: Source | None, ids: mx.array | None) -> GreedyChain | None:
        """The chain of these matrices; None where the kernel does not read them."""
        held, out = Matrix.of(table), Matrix.of(project)
        if held is None or out is None or project is None or held.dtype != out.dtype:
            return None
        if not takes(project.inputs, held, out):
            return None
        return cls(held, out, project.inputs, ids)

    def right_here(self, base: mx.array) -> bool:
        """Whether the kernel compiles on this device and, for such logits, drafts what is best in float32.

        Never raises: where it does not, the head's own operations are used.
        """
        try:
            return self._best(base)
        except (RuntimeError, ValueError):
            return False

    def _best(self, base: mx.array) -> bool:
        anchors = mx.arange(base.shape[0], dtype=mx.int32)
        drafts = self(base, anchors)
        if self.ids is not None:
            drafts = mx.argmax(self.ids == drafts[..., None], axis=-1)
        first = drafts[:, 0]
        bias = self.table.rows(anchors) @ self.project.rows(mx.arange(base.shape[2])).T
        logits = base[:, 0].astype(mx.float32) + bias
        chosen = mx.take_along_axis(logits, first[:, None].astype(mx.int32), axis=1)[:, 0]
        close = mx.max(logits, axis=1) - chosen <= _TOLERANCE * mx.max(mx.abs(logits), axis=1)
        return bool(mx.all(close).item())

    def __call__(self, base: mx.array, anchors: mx.array) -> mx.array:
        """Target ids `[rows, width]` int32 from logits `[rows, width, draft_vocab]` of 16 bits and anchors
        `[rows]`. Equal logits: the lower id."""
        rows, width, vocab = base.shape
        blocks = min(BLOCKS, -(-vocab // ROWS))
        anchors = anchors.astype(mx.int32)
        found: list[mx.array] = []
        for slot in range(width + 1):
            last = slot == width
            inputs = [base, _slot(slot), anchors, *self.table.arrays, *self.project.arrays]
            inputs += [*([self.ids] if self.ids is not None else []), *found]
            shapes = [] if last else [(rows, blocks), (rows, blocks)]
            dtypes = [] if last else [mx.float32, mx.int32]
            found = self._step(first=not slot, last=last)(
                inputs=inputs,
                template=[("T", base.dtype), *self._numbers()],
                grid=((1 if last else blocks) * THREADS, rows, 1),
                threadgroup=(THREADS, 1, 1),
                output_shapes=[*shapes, (rows, width)],
                output_dtypes=[*dtypes, mx.int32],
            )
        return found[-1]

    def _step(self, *, first: bool, last: bool) -> Any:
        return _kernel(first, last, self.table.packed, self.project.packed, self.ids is not None)

    def _numbers(self) -> list[tuple[str, int]]:
        return [
            ("RANK", self.rank),
            ("TABLE_BITS", self.table.bits),
            ("TABLE_GROUP", self.table.group),
            ("BITS", self.project.bits),
            ("GROUP", self.project.group),
        ]


def takes(rank: int, table: Matrix, project: Matrix) -> bool:
    """Whether rows of these matrices divide among lanes."""
    lanes = rank * project.bits // 128
    whole = rank * project.bits % 128 == 0 and rank * table.bits % 32 == 0
    return whole and lanes in (1, 2, 4, 8, 16, 32) and project.group * project.bits >= 128


def names(first: bool, last: bool, table: bool, project: bool, ids: bool) -> tuple[list[str], list[str]]:
    """The inputs and outputs of a step, in their order."""
    inputs = ["base", "at", "anchors", "table", *(["table_scales", "table_biases"] if table else [])]
    inputs += ["weights", *(["scales", "biases"] if project else []), *(["ids"] if ids else [])]
    inputs += [] if first else ["before", "before_index", "tokens_before"]
    return inputs, [*([] if last else ["found", "found_index"]), "tokens"]


def defines(first: bool, last: bool, table: bool, project: bool, ids: bool) -> str:
    """The choices of a step that are made before compiling."""
    chosen = {"FIRST": first, "LAST": last, "TABLE_PACKED": table, "PACKED": project, "IDS": ids}
    return "".join(f"#define {name} {int(value)}\n" for name, value in chosen.items())


@cache
def _kernel(first: bool, last: bool, table: bool, project: bool, ids: bool) -> Any:
    form = (first, last, table, project, ids)
    header, body = [defines(*form), File("cuda_chain", "numbers.cuh")], File("cuda_chain", "step.cu")
    return templated("chain", header, body, *names(*form))


@cache
def _slot(slot: int) -> mx.array:
    made = mx.array([slot], mx.int32)
    mx.eval(made)
    return made
