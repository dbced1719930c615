"""The most memory that a turn took."""

from __future__ import annotations

import mlx.core as mx
import psutil


class PeakMemory:
    """Watches from when it is made.

    On the CPU back end weights may be held outside of MLX, so there the peak is at least what the process has
    resident.
    """

    def __init__(self) -> None:
        self._before = mx.get_active_memory()
        mx.reset_peak_memory()

    def read(self) -> dict[str, int]:
        """`peak_bytes`, loaded weights included, and `used_bytes`, what of it MLX did not hold before."""
        peak = mx.get_peak_memory()
        used = max(0, peak - self._before)
        if mx.default_device().type == mx.DeviceType.cpu:
            peak = max(peak, psutil.Process().memory_info().rss)
        return {"peak_bytes": peak, "used_bytes": used}
