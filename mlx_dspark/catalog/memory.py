"""The memory that a model can have on this machine: of the GPU that MLX computes on, else of the system."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import psutil

from mlx_dspark.catalog.fit import Memory

_CGROUPS = Path("/sys/fs/cgroup")
_VERSIONS = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory"),
)
_UNLIMITED = 1 << 60


def memory_here(released: int = 0) -> Memory | None:
    """What models can have here: Metal's recommended working set, the memory of a CUDA GPU, else what the
    system has available within this process's control group, and `released` bytes that will be by then. None
    where it cannot be told."""
    if mx.default_device().type == mx.DeviceType.cpu:
        have = _system()
        return None if have is None else Memory(have.bytes + released, have.source)
    try:
        about = mx.device_info()
    except (RuntimeError, ValueError):
        return None
    for name, source in _DEVICE:
        if isinstance(size := about.get(name), int) and size > 0:
            return Memory(size, source)
    return None


_DEVICE = (
    ("max_recommended_working_set_size", "Metal's recommended working set"),
    ("total_memory", "the memory of the GPU"),
    ("memory_size", "the memory of the GPU"),
)
"""What MLX's device_info calls it."""


def _system() -> Memory | None:
    try:
        available = psutil.virtual_memory().available
    except (OSError, RuntimeError):
        return None
    group = group_room(_CGROUPS)
    if group is not None and group < available:
        return Memory(group, "the memory left to this control group")
    return Memory(available, "the memory available")


def group_room(root: Path) -> int | None:
    """Bytes left within the limit of the control group mounted at `root`; None where there is no limit.

    File pages that the kernel gives back count as left.
    (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files)
    """
    for limit_name, used_name, folder in _VERSIONS:
        limit, used = _number(root / folder / limit_name), _number(root / folder / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED:
            return max(0, limit - used + _reclaimable(root / folder / "memory.stat"))
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path) -> int:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return 0
    return sum(int(value) for name, value in words if name in ("inactive_file", "active_file"))
