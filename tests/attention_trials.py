"""Trials of the Metal attention kernel in the shim: calls that are compared with float32."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dspark.kernels.metal_attention import reference
from mlx_dspark.kernels.metal_attention.kernel import Geometry, attend
from tests import metal_shim as shim
from tests.metal_shim.capture import Change

UNIT = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
"""One unit in the last place of a number between 1 and 2: so many bits follow the first."""

SPARE = 9
"""Positions of a cache beyond the keys that are seen. They hold no numbers."""


@dataclass(frozen=True)
class AttentionTrial:
    """One call in one layout. Called, it runs the kernel in the shim and says what is wrong.

    `mask` is "none", "causal", "random" (booleans that differ by head; the first query sees nothing) or
    "ragged" (rows of different lengths, padded). `lay` says how arrays lie in memory. `loud` is what queries
    are multiplied by.
    """

    heads: int
    kv_heads: int
    dim: int
    width: int
    length: int
    dtype: mx.Dtype = mx.float16
    mask: str = "causal"
    rows: int = 1
    sinks: bool = False
    window: int = 0
    geometry: Geometry | None = None
    lay: str = "cache"
    loud: float = 1.0

    def __str__(self) -> str:
        where = f"{self.rows}x{self.heads}/{self.kv_heads} of {self.dim}, {self.width} over {self.length}"
        how = self.geometry
        laid = f" {how.simd}.{how.blocks}.{int(how.staged)}" if how else ""
        extra = (
            " sinks" * self.sinks + f" window {self.window}" * bool(self.window) + " loud" * (self.loud > 1)
        )
        return f"{where}, {self.mask}{extra}{laid} {self.lay} {str(self.dtype).rpartition('.')[2]}"

    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values. In a "cache", keys are the first positions of a buffer and queries are
        transposed; "apart" has other dims between those of a head; "odd" has rows at odd places."""
        rng = np.random.default_rng(self.length + self.width)

        def made(*shape: int) -> mx.array:
            return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(self.dtype)

        queries = made(self.rows, self.width, self.heads, self.dim).swapaxes(1, 2) * self.loud
        shape = (self.rows, self.kv_heads, self.length, self.dim)
        empty = mx.full((*shape[:2], SPARE, self.dim), nan, self.dtype)
        keys, values = (mx.concatenate([made(*shape), empty], axis=2) for _ in range(2))
        if self.lay == "apart":
            queries, keys, values = (_apart(each) for each in (queries, keys, values))
        elif self.lay == "odd":
            queries, keys, values = (
                mx.pad(each, [(0, 0)] * 3 + [(1, 2)])[..., 1:-2] for each in (queries, keys, values)
            )
        return queries, keys[:, :, : self.length], values[:, :, : self.length]

    def seen(self) -> Any:
        """The mask as it is given."""
        if self.mask in ("none", "causal"):
            return None if self.mask == "none" else "causal"
        rng = np.random.default_rng(self.length)
        keys = np.arange(self.length)
        if self.mask == "ragged":
            ends = rng.integers(self.width, self.length // 2, (self.rows, 1, 1, 1))
            return _booleans(keys < ends - self.width + 1 + np.arange(self.width)[:, None])
        drawn = rng.random((self.rows, self.heads, self.width, self.length)) < 0.5
        drawn[0, 0, 0] = False
        return _booleans(drawn)

    def __call__(self, schedule: str, mode: shim.Mode, change: Change | None = None) -> str | None:
        error, ran = self.ran(schedule, mode, change)
        if not error <= 1:
            return f"{error:.3g} units in the last place of the largest output"
        return self.overread(ran) if mode is shim.Mode.TRAFFIC else None

    def ran(
        self,
        schedule: str = "forward",
        mode: shim.Mode = shim.Mode.PLAIN,
        change: Change | None = None,
        seed: int = 7,
    ) -> tuple[float, shim.Run]:
        """The largest difference from float32 in units in the last place of the largest output, and the run.
        Infinite where a result is no number."""
        queries, keys, values = self.arrays()
        sinks = mx.array(np.linspace(-1, 3, self.heads), self.dtype) if self.sinks else None
        given = (queries, keys, values, self.dim**-0.5, self.seen(), sinks)

        def launched(factory: Any) -> mx.array:
            return attend(*given, window=self.window, geometry=self.geometry, factory=factory)

        ran = shim.run(launched, schedule, seed=seed, mode=mode, change=change)
        got = np.array(ran.value.astype(mx.float32))
        wanted = reference.attend(*given, window=self.window)
        assert got.shape == wanted.shape
        error = float(np.abs(got - wanted).max() / np.abs(wanted).max()) / UNIT[self.dtype]
        return (error if np.isfinite(error) else inf), ran

    def overread(self, ran: shim.Run) -> str | None:
        """Which of keys and values a traffic run read more than once, or though no query sees them."""
        assert self.geometry is not None
        for name, block in (("k", 8 * self.geometry.blocks), ("v", self.geometry.keys)):
            loaded, wanted = ran.launches[0].traffic[name].loaded, self.bytes_seen(block)
            if loaded > wanted:
                return f"{name}: {loaded} bytes are read, {wanted} are needed"
        return None

    def bytes_seen(self, keys: int) -> int:
        """Of the keys, or of their values, in ranges of so many of which some query sees one."""
        seen = np.broadcast_to(reference.seen(self.width, self.length, self.seen(), self.window), self.masked)
        begin = max(0, self.length - self.width + 1 - self.window) if self.window else 0
        ranges = [seen[..., at : at + keys] for at in range(begin, self.length, keys)]
        grouped = (self.rows, self.kv_heads, -1)
        counts = [each.reshape(grouped).any(-1).sum() * each.shape[-1] for each in ranges]
        return int(sum(counts)) * self.dim * 2

    @property
    def masked(self) -> tuple[int, int, int, int]:
        """The shape of a whole mask."""
        return self.rows, self.heads, self.width, self.length


def _booleans(mask: Any) -> mx.array:
    return mx.array(mask)


def _apart(array: mx.array) -> mx.array:
    """The same numbers, each before one that is none."""
    return mx.stack([array, mx.full(array.shape, nan, array.dtype)], axis=4).flatten(3)[..., ::2]
