"""Rotary position embedding in the variants that drafter configs declare.

Pairs are (i, i + dims / 2), with the kind `interleaved` (2i, 2i + 1); with the kind `partial` only the first
`partial_rotary_factor` of the dimensions rotate, and `dims` above is their number. Positions are absolute.
The formulas are those of transformers'
`modeling_rope_utils`; YaRN is Peng et al. 2023, "YaRN: efficient context window extension".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx


class Rope:
    """Rotates `[rows, heads, width, dims]`; `kind` is default, partial, interleaved, linear, llama3, yarn or
    proportional."""

    def __init__(
        self, dims: int, theta: float, kind: str = "default", options: Mapping[str, float] | None = None
    ) -> None:
        options = options or {}
        self.dims = int(dims * options["partial_rotary_factor"]) if kind == "partial" else dims
        self.interleaved = kind == "interleaved"
        self.theta = theta
        self.magnitude = 1.0
        self._wavelengths: mx.array | None = None
        if kind not in ("default", "partial", "interleaved"):
            inverse, self.magnitude = inverse_frequencies(dims, theta, kind, options)
            self._wavelengths = mx.array([1 / f if f else math.inf for f in inverse], dtype=mx.float32)

    @property
    def plain(self) -> bool:
        """Whether pairs (i, i + dims / 2) turn by the powers of `theta`."""
        return not self.interleaved and self._wavelengths is None

    def __call__(self, x: mx.array, position: int | mx.array) -> mx.array:
        """`position` is that of slot 0: one for all rows, or `[rows]`."""
        if self.magnitude != 1.0:
            x = x * mx.array(self.magnitude, dtype=x.dtype)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.interleaved,
            base=self.theta if self._wavelengths is None else None,
            scale=1.0,
            offset=position,
            freqs=self._wavelengths,
        )


def inverse_frequencies(
    dims: int, theta: float, kind: str, options: Mapping[str, float]
) -> tuple[list[float], float]:
    """Angle per position of each pair (0: not rotated), and the factor on rotated vectors."""
    plain = [theta ** (-2 * pair / dims) for pair in range(dims // 2)]
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return [f / options["factor"] for f in plain], 1.0
    if kind == "proportional":
        rotated = int(options.get("partial_rotary_factor", 1.0) * dims / 2)
        factor = options.get("factor", 1.0)
        return [f / factor if pair < rotated else 0.0 for pair, f in enumerate(plain)], 1.0
    if kind == "llama3":
        return [_llama3(f, options) for f in plain], 1.0
    if kind == "yarn":
        return _yarn(plain, dims, theta, options), _yarn_magnitude(options)
    raise ValueError(f"unknown rope kind {kind!r}")


def _llama3(frequency: float, options: Mapping[str, float]) -> float:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    turns = options["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return kept * frequency + (1 - kept) * frequency / options["factor"]


def _yarn(plain: list[float], dims: int, theta: float, options: Mapping[str, float]) -> list[float]:
    context, factor = options["original_max_position_embeddings"], options["factor"]

    def pair_turning(turns: float) -> float:
        return dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(options.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_turning(options.get("beta_slow", 1.0))), dims - 1)
    ramps = (min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0) for pair in range(len(plain)))
    return [f * (1 - ramp) + f / factor * ramp for f, ramp in zip(plain, ramps, strict=True)]


def _yarn_magnitude(options: Mapping[str, float]) -> float:
    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(options["factor"]) + 1.0 if options["factor"] > 1 else 1.0

    if "attention_factor" in options:
        return options["attention_factor"]
    if "mscale" in options and "mscale_all_dim" in options:
        return grown(options["mscale"]) / grown(options["mscale_all_dim"])
    return grown(1.0)
