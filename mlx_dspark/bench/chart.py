"""A bar chart as lines of text. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EIGHTHS = " ▏▎▍▌▋▊▉"
FULL = "█"


@dataclass(frozen=True)
class Bar:
    """One bar, of a group of them; `low` and `high` are the spread of `value`, `note` stands beside it."""

    group: str
    label: str
    value: float
    low: float
    high: float
    note: str = ""


def bar(value: float, most: float, cells: int) -> str:
    """A bar of `cells` character cells for `most`, in steps of an eighth."""
    eighths = round(8 * cells * max(0.0, value) / most) if most > 0 else 0
    eighths = min(eighths, 8 * cells)
    return FULL * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def chart(bars: Sequence[Bar], width: int) -> list[str]:
    """Lines of at most `width` characters: a heading for each group, and a line for each bar."""
    if not bars:
        return []
    most = max(each.value for each in bars)
    label = max(len(each.label) for each in bars)
    beside = max(len(_beside(each)) for each in bars)
    cells = max(4, width - label - beside - 4)
    lines: list[str] = []
    group = None
    for each in bars:
        if each.group != group:
            lines += ["", each.group] if lines else [each.group]
            group = each.group
        lines.append(
            f"  {each.label:<{label}} {bar(each.value, most, cells):<{cells}} {_beside(each)}".rstrip()
        )
    return lines


def _beside(each: Bar) -> str:
    return f"{each.value:.1f} {each.note}".rstrip()
