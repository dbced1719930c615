"""What `mlx-dspark kernels --check` tries on a back end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import mlx.core as mx

from mlx_dspark.kernels.framework.cpu_live import WITHOUT_LLVMLITE
from mlx_dspark.kernels.framework.cpu_ways import CpuAttention, CpuSwiglu, CpuWeights
from mlx_dspark.kernels.framework.kernel import AttentionShape, Case, Checked, Kernel
from mlx_dspark.kernels.framework.live import KernelState
from mlx_dspark.kernels.framework.registry import BackEnd, entries_of
from mlx_dspark.kernels.framework.shapes import MatrixShape

_WAYS = "mlx_dspark.kernels.framework.cpu_ways:"
_NEED_LLVMLITE = {
    "cpu-weights-blocks": f"{_WAYS}blocks",
    "cpu-attention": f"{_WAYS}attention",
    "cpu-swiglu": f"{_WAYS}swiglu",
}
_STANDING = {"cuda-attention": "mlx_dspark.kernels.framework.standing:attention"}


def checkable(back_end: BackEnd) -> tuple[dict[str, str], list[KernelState]]:
    """The functions that make each kernel of a back end, by its name, and those that cannot be had here."""
    if back_end != "cpu":
        standing = _STANDING if back_end == "cuda" else {}
        return {entry.name: entry.made_by for entry in entries_of(back_end)} | standing, []
    dense = {"cpu-weights-dense": f"{_WAYS}dense"}
    if find_spec("llvmlite") is None:
        return dense, [KernelState(name, 0, WITHOUT_LLVMLITE) for name in _NEED_LLVMLITE]
    return _NEED_LLVMLITE | dense, []


def cases_to_check(kernel: Kernel, cases: Iterable[Case]) -> list[Case]:
    """A kernel's own cases, then those of a model."""
    own = list(kernel.check_cases()) if isinstance(kernel, Checked) else []
    return list(dict.fromkeys([*own, *cases]))


def cpu_cases(
    kernel: Kernel,
    shapes: Sequence[str],
    attended: Sequence[AttentionShape],
    inner: Sequence[int],
    context: int,
) -> list[Case]:
    """The cases of a model on the CPU: of its matrices, its attentions, the widths of its feed-forwards."""
    match kernel:
        case CpuWeights():
            outlines = [(MatrixShape.parse(shape), MatrixShape.parse(shape).outline()) for shape in shapes]
            taken = [shape for shape, source in outlines if kernel.refusal(source, mx.float32) is None]
            return [Case(str(shape), width) for shape in taken for width in kernel.widths]
        case CpuAttention():
            kinds = dict.fromkeys(shape.at(0) for shape in attended if shape.dtype == mx.float32)
            lengths = [length for length in kernel.lengths if length <= context]
            return [
                kernel.case(kind.at(length), width)
                for kind in kinds
                if not kind.sinks and kind.head_dim % 16 == 0
                for length in lengths
                for width in kernel.widths
            ]
        case CpuSwiglu():
            return [Case(str(width), rows) for width in dict.fromkeys(inner) for rows in (1, 8)]
        case _:
            return []
