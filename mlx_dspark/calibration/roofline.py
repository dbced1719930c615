"""The most tokens a second that plain decoding can reach, and what would raise it. Arithmetic, without MLX.

A token reads every weight that takes part once, and what its layers remember of the text before it: no
machine decodes plainly faster than its memory delivers these bytes (Williams et al. 2009, the roofline).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_dspark.catalog.fit import StateBytes

HEALTHY, FAIR = 0.75, 0.5
"""Shares of the memory's bandwidth from which plain decoding is as it should be, or nearly."""

Level = Literal["healthy", "ok", "low", "unknown"]


_NONE = StateBytes()


@dataclass(frozen=True)
class Traffic:
    """Bytes that one token reads: `weights` whatever its place, and what `states` hold of the text before."""

    weights: int
    states: StateBytes = _NONE

    def at(self, depth: int) -> int:
        """With so many tokens before it."""
        return self.weights + self.states.content(depth)


def ceiling(traffic: Traffic, bandwidth: float, depth: int) -> float:
    """Tokens a second; `bandwidth` in bytes a second."""
    read = traffic.at(depth)
    return bandwidth / read if read else 0.0


@dataclass(frozen=True)
class Judged:
    """How plain decoding stands to its ceiling: `share` of the bandwidth that it uses, None where no plain
    round was measured; `levers` say what would make it faster, the strongest first."""

    level: Level
    share: float | None
    headline: str
    levers: tuple[str, ...]


def judge(share: float | None, *, levers: tuple[str, ...] = ()) -> Judged:
    """The verdict on a share of the bandwidth."""
    if share is None:
        headline = "No plain round was measured, so there is nothing to compare with the ceiling."
        return Judged("unknown", None, headline, levers)
    level: Level = "healthy" if share >= HEALTHY else "ok" if share >= FAIR else "low"
    words = {
        "healthy": "Plain decoding is as fast as the memory lets it be",
        "ok": "Plain decoding is near what the memory lets it be",
        "low": "Plain decoding is limited by something else than the memory",
    }
    return Judged(level, share, f"{words[level]}: it uses {share:.0%} of the measured bandwidth.", levers)
