"""What a trial found out about a kernel in one case."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

State = Literal["live", "costly", "slower", "wrong", "refused", "stalled", "failed", "untried"]
STATES: tuple[State, ...] = get_args(State)
_NUMBERS = ("kernel_us", "stock_us", "error", "kernel_host_us", "stock_host_us")


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel is used in a case, and what it rests on.

    state      live: it is used. costly: it is right, steady and faster on the device, and a launch costs the
               host more than MLX's by more than MLX takes there: it is used in one launch with others that
               are live, and not alone. slower: MLX is as fast. wrong: it differs from float32. refused: the
               device takes no geometry of it. stalled: it took much longer than it should, or never came
               back. failed: it raised something else, or took its process with it. untried: no trial could be
               run, which is not remembered
    reason     in words; empty where it is live
    geometry   the `repr` of the launch it was tried in
    kernel_us, stock_us   microseconds of a launch in the race, medians; 0 where none was run. On a GPU of the
               device alone; on the CPU of the whole evaluation
    error      largest error as a share of the largest output
    refusals   what the device said of each geometry that it does not take
    kernel_host_us, stock_host_us   microseconds of the host to build and encode a launch, medians; 0 where
               that was not measured
    """

    state: State
    reason: str = ""
    geometry: str = ""
    kernel_us: float = 0.0
    stock_us: float = 0.0
    error: float = 0.0
    refusals: tuple[str, ...] = ()
    kernel_host_us: float = 0.0
    stock_host_us: float = 0.0

    @property
    def admitted(self) -> bool:
        return self.state == "live"

    @property
    def speed_up(self) -> float:
        """How many times as fast as MLX; 0 where that was not measured."""
        return self.stock_us / self.kernel_us if self.kernel_us else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"refusals": list(self.refusals)}

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Verdict:
        """Raises ValueError, TypeError or KeyError for what `to_json` does not give."""
        if set(raw) != {each.name for each in fields(cls)} or raw["state"] not in STATES:
            raise ValueError("this is not a verdict")
        numbers = [float(raw[name]) for name in _NUMBERS]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("a verdict has numbers of 0 or more")
        kernel_us, stock_us, error, *host = numbers
        refusals = tuple(str(each) for each in raw["refusals"])
        words = str(raw["reason"]), str(raw["geometry"])
        return cls(raw["state"], *words, kernel_us, stock_us, error, refusals, *host)
