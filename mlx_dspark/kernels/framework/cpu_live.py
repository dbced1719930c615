"""What the CPU back end runs a model on, told as of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import mlx.nn as nn

from mlx_dspark.kernels.dispatch import STOCK, CpuWeightsReport
from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.live import KernelState
from mlx_dspark.kernels.framework.verdict import Verdict
from mlx_dspark.kernels.race import PREFILL_WIDTH, Timing

WITHOUT_LLVMLITE = "the package llvmlite is not installed"
ALL = "all matrices"
"""The shape of what the race at load estimates."""


def cpu_states(report: CpuWeightsReport | None, model: nn.Module) -> list[KernelState]:
    """The ways of holding weights, the attention and the feed-forward, of a model that was placed."""
    if report is None or report.choice is None:
        return []
    from mlx_dspark.kernels.cpu_dense.matrix import Dense

    states = [_way("dense", Dense.version, report)]
    if find_spec("llvmlite") is None:
        missing = ("cpu-weights-blocks", "cpu-attention", "cpu-swiglu")
        return [*(KernelState(name, 0, WITHOUT_LLVMLITE) for name in missing), *states]
    from mlx_dspark.kernels.cpu_attention.kernel import VERSION
    from mlx_dspark.kernels.cpu_blocks.matrix import Blocks
    from mlx_dspark.kernels.cpu_swiglu.module import HeldSwiglu

    held = report.choice != STOCK
    gated = any(isinstance(module, HeldSwiglu) for module in model.modules())
    return [
        _way("blocks", Blocks.version, report),
        *states,
        KernelState("cpu-attention", VERSION, "" if held else "the weights are held in MLX's own way"),
        KernelState(
            "cpu-swiglu", 1, "" if gated else "no feed-forward of the model is of this kind, and held"
        ),
    ]


def _way(name: str, version: int, report: CpuWeightsReport) -> KernelState:
    by_name = {timing.name: timing for timing in report.timings}
    cases = _cases(by_name[name], by_name[STOCK], report.choice or "") if name in by_name else {}
    why = dict(report.absent).get(name, "")
    if not why and report.choice != name:
        why = (
            f"{report.choice} was pinned" if report.reason == "pinned" else f"{report.choice} is better here"
        )
    return KernelState(f"cpu-weights-{name}", version, why, cases)


def _cases(mine: Timing, stock: Timing, choice: str) -> Mapping[Case, Verdict]:
    pairs = {
        1: (mine.plain_ms, stock.plain_ms),
        8: (mine.verify_ms, stock.verify_ms),
        PREFILL_WIDTH: (mine.prefill_ms, stock.prefill_ms),
    }
    chosen = mine.name == choice
    return {
        Case(ALL, width): Verdict(
            "live" if chosen else "slower",
            "" if chosen else f"{choice} was chosen for all of them",
            kernel_us=1e3 * ours,
            stock_us=1e3 * theirs,
        )
        for width, (ours, theirs) in pairs.items()
    }
