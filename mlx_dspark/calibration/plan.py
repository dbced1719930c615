"""Which rounds and drafts are timed, and which of them are left out where time or memory is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 17, 33)
"""Widths between these are interpolated."""
DEEP_WIDTHS = (1, 4, 8, 17)
BARE_WIDTH = 2
"""Width of the forwards that are timed without the rest of a round, to tell what the rest takes."""
CAPS = (1, 2, 4)

SHALLOW, DEEP = 128, 4096
_LEAST_GAP = 256
_SHARE_OF_MEMORY = 0.15
_COPIES = 3
"""So many times a deep row may be held for a moment: as it is filled, when it grows, and as it is."""
_KEPT_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to time: a round of `size` tokens, a propose of at most `size` drafts by `source`, or, with
    `bare`, a forward of `size` tokens outside the loop."""

    size: int
    depth: int
    source: str = ""
    bare: bool = False


def depths(bytes_per_token: float, available: int, context: int) -> tuple[int, ...]:
    """The depths to time at: a shallow one, and a deep one where that is affordable.

    `bytes_per_token` is what a row takes for each token of depth, `available` the free memory in bytes.
    """
    shallow = max(1, min(SHALLOW, context // 4))
    room = _SHARE_OF_MEMORY * available / (_COPIES * max(bytes_per_token, 1.0))
    deep = int(min(DEEP, context - 2 * WIDTHS[-1], room))
    return (shallow, deep) if deep >= shallow + _LEAST_GAP else (shallow,)


@dataclass(frozen=True)
class Plan:
    """What to time: `needed` in any case, as much of `rest` as there is time for, first things first."""

    needed: tuple[Item, ...]
    rest: tuple[Item, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        return self.needed + self.rest

    def affordable(self, cost: Mapping[Item, float], seconds: float) -> list[Item]:
        """The items that together cost about so many seconds."""
        left, kept = seconds - sum(cost[item] for item in self.needed), list(self.needed)
        for item in self.rest:
            if cost[item] <= left:
                left -= cost[item]
                kept.append(item)
        return kept


def pair_plan(most: Mapping[str, int], at: Sequence[int], *, context: int) -> Plan:
    """What to time of one row, at these depths, with sources that draft at most `most[name]` tokens.

    Raises ValueError where nothing drafts.
    """
    if not most:
        raise ValueError("nothing drafts")
    widest = min(max(most.values()) + 1, max(2, context - at[-1] - 1))
    shallow, deep = at[0], at[1:]
    deep_widths = _up_to(min(widest, DEEP_WIDTHS[-1]), DEEP_WIDTHS)
    needed = [Item(width, shallow) for width in _up_to(widest, _KEPT_WIDTHS)]
    needed.append(Item(BARE_WIDTH, shallow, bare=True))
    needed += [Item(cap, shallow, name) for name, each in most.items() for cap in _up_to(each, CAPS[:1])]
    rest = [Item(width, depth) for depth in deep for width in (deep_widths[0], deep_widths[-1])]
    rest += [Item(each, depth, name) for depth in deep for name, each in most.items()]
    rest += [Item(width, shallow) for width in _up_to(widest, WIDTHS)]
    rest += [Item(width, depth) for depth in deep for width in deep_widths]
    rest += [Item(cap, shallow, name) for name, each in most.items() for cap in _up_to(each, CAPS)]
    return Plan(tuple(needed), tuple(item for item in dict.fromkeys(rest) if item not in needed))


def rows_plan(most: Mapping[str, int], at: int, *, context: int) -> Plan:
    """The shorter plan for several rows."""
    widest = min(max(most.values()) + 1, max(2, context - at - 1))
    rounds = [Item(width, at) for width in _up_to(min(widest, _KEPT_WIDTHS[-1]), _KEPT_WIDTHS)]
    drafts = [Item(each, at, name) for name, each in most.items()]
    return Plan((*rounds, Item(BARE_WIDTH, at, bare=True), *drafts))


def _up_to(widest: int, widths: Sequence[int]) -> list[int]:
    """Those below `widest`, and `widest`."""
    return [*(width for width in widths if width < widest), widest]
