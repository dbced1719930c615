"""`kernels`: which kernels of ours a model runs on here, and a check of all of them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress, note
from mlx_dspark.cli.streams import require_output
from mlx_dspark.foundation.kernel_settings import KernelSettings
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from rich.table import Table

    from mlx_dspark.doctor.kernels import KernelReport
    from mlx_dspark.kernels.framework.live import KernelState

FAULTY = 2
"""The exit code where a checked case is at fault."""
TIMES = "us: microseconds of a launch on the device alone, as in a long graph"
USED = (
    *("model", "trust_remote_code", "memory_guard", "cpu_weights"),
    *("small_m", "multirow_attn", "wide_gemm", "replay"),
)
"""The knobs of loading that this command has a use for."""
UNUSED = tuple(knob.name for knob in LoadSettings.knobs() if knob.name not in USED)


def kernels(own: KernelSettings, loading: LoadSettings) -> int:
    """Tell which kernels a model runs on here, and why not on others; exit code 2 where a check finds a
    fault."""
    from mlx_dspark.doctor.kernels import kernel_report

    refuse_ranks("kernels")
    require_output()
    progress = Progress()
    report = kernel_report(loading, progress, check=own.check)
    progress.clear()
    if own.json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        _print(report)
    if own.check and not report.sound:
        note(
            "mlx-dspark: a kernel is at fault on this machine; it is not used in these cases. Please send us "
            "what --json prints."
        )
        return FAULTY
    return 0


def _print(report: KernelReport) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout)
    console.print(f"{report.model} · {report.machine}", highlight=False)
    if not report.states and not report.remarks:
        console.print(f"no kernel of ours for {report.back_end}", highlight=False)
    if report.back_end != "cpu" and any(state.cases for state in report.states):
        console.print(TIMES, highlight=False)
    for state in report.states:
        live = "live" if state.name in report.live else f"off: {state.why}"
        console.print(f"{state.name} {state.version} · {live}", highlight=False, markup=False)
        if state.cases:
            console.print(_table(state))
        for line in _beside(state):
            console.print(f"  {line}", highlight=False, markup=False)
    for remark in report.remarks:
        console.print(remark, highlight=False, markup=False)


def _table(state: KernelState) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("shape", "rows", "state", "MLX us", "ours us", "x MLX", "error"):
        table.add_column(
            title, no_wrap=True, overflow="ignore", justify="left" if title == "shape" else "right"
        )
    for case, found in sorted(state.cases.items()):
        timed = found.kernel_us > 0
        table.add_row(
            case.shape,
            str(case.width),
            found.state,
            f"{found.stock_us:.1f}" if timed else "",
            f"{found.kernel_us:.1f}" if timed else "",
            f"{found.speed_up:.2f}" if timed else "",
            f"{found.error:.1e}" if found.geometry or found.error else "",
        )
    return table


def _beside(state: KernelState) -> list[str]:
    """What the table has no room for: why a case is not served, and what the device refuses."""
    told = {f"{case}: {found.reason}": None for case, found in sorted(state.cases.items()) if found.reason}
    told |= {f"refused: {each}": None for found in state.cases.values() for each in found.refusals}
    return list(told)
