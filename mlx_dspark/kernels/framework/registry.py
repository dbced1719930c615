"""Every kernel of ours by back end. Nothing is imported until it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_dspark.kernels.framework.kernel import Kernel
from mlx_dspark.kernels.framework.trial import made

BackEnd = Literal["cpu", "metal", "cuda"]
Switch = Literal["small_m", "multirow_attn", "wide_gemm"]

_KERNELS = "mlx_dspark.kernels."


@dataclass(frozen=True)
class Entry:
    """A kernel of the framework: where it runs, the function that makes it, and the setting that it is under.

    `unproven` are names of devices, or parts of them, where it is off unless it is asked for by that setting.
    """

    name: str
    back_ends: tuple[BackEnd, ...]
    made_by: str
    switch: Switch
    unproven: tuple[str, ...] = ()

    def kernel(self) -> Kernel:
        return made(self.made_by)

    def off_here(self, device: str) -> str:
        """Why it is off on this device unless it is asked for; empty where it is not."""
        found = next((each for each in self.unproven if each in device), "")
        return f"not verified on {found} yet" if found else ""


ENTRIES: tuple[Entry, ...] = (
    Entry("metal-small-m", ("metal",), _KERNELS + "metal_small_m.kernel:kernel", "small_m", ("M5",)),
    Entry(
        "metal-small-m-experts",
        ("metal",),
        _KERNELS + "metal_small_m.kernel:experts_kernel",
        "small_m",
        ("M5",),
    ),
    Entry(
        "metal-attention",
        ("metal",),
        _KERNELS + "metal_attention.cases:MetalAttention",
        "multirow_attn",
        ("M5",),
    ),
    Entry("cuda-small-m", ("cuda",), _KERNELS + "cuda_small_m.kernel:kernel", "small_m"),
    Entry("cuda-small-m-experts", ("cuda",), _KERNELS + "cuda_small_m.experts:kernel", "small_m"),
    Entry("wide-gemm", ("metal", "cuda"), _KERNELS + "wide_gemm.kernel:kernel", "wide_gemm"),
    Entry("wide-gemm-experts", ("metal", "cuda"), _KERNELS + "wide_gemm.kernel:experts_kernel", "wide_gemm"),
)


def back_end_here() -> BackEnd:
    """What MLX's default device runs on."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def entries_of(back_end: BackEnd, entries: Sequence[Entry] | None = None) -> list[Entry]:
    """The kernels offered there, of all or of `entries`."""
    return [entry for entry in (ENTRIES if entries is None else entries) if back_end in entry.back_ends]
