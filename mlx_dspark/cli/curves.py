"""Cost curves as tables: what a round costs by width, and what a cap would bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_dspark.calibration.shape import knee, verify_curve
from mlx_dspark.foundation.curves import CostCurves

if TYPE_CHECKING:
    from rich.table import Table

ACCEPTANCE = (0.5, 0.7, 0.8, 0.9)
"""Chances that a draft is accepted for which rates are predicted."""
_BAR = 24
_CAPS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)


def caps_of(curves: CostCurves, source: str) -> list[int]:
    """The caps to tell of: 0, and up to the widest that was measured."""
    most = max(point.cap for point in curves.draft[source])
    return sorted({*(cap for cap in _CAPS if cap < most), most})


def rates(curves: CostCurves, source: str, acceptance: float) -> dict[int, float]:
    """Predicted rate as a multiple of plain decoding, by cap."""
    predicted = {cap: curves.speedup([acceptance], cap, source=source) for cap in caps_of(curves, source)}
    return {cap: rate for cap, rate in predicted.items() if rate is not None}


def best_of(predicted: dict[int, float]) -> int:
    """The cap with the best rate, the least of equals."""
    return max(sorted(predicted), key=lambda cap: predicted[cap])


def verify_table(curves: CostCurves) -> Table:
    """A round by width: milliseconds at each depth, and how many plain rounds it costs."""
    from rich.table import Table

    points = [point for point in curves.verify if point.rows == 1]
    shallow, *deep = sorted({point.depth for point in points})
    curve = verify_curve(curves)
    spread = {point.width: point.spread for point in points if point.depth == shallow}
    bend, longest = knee(curve), max(curve.values())
    table = Table("width", f"ms at {shallow}", "spread", *(f"ms at {depth}" for depth in deep), "x plain", "")
    for width, seconds in sorted(curve.items()):
        at_depths = [verify_curve(curves, depth=depth).get(width) for depth in deep]
        table.add_row(
            str(width),
            f"{seconds * 1e3:.2f}",
            f"{spread[width]:.1%}",
            *("" if each is None else f"{each * 1e3:.2f}" for each in at_depths),
            f"{seconds / curve[1]:.2f}",
            "█" * max(1, round(_BAR * seconds / longest)) + (" ◂ knee" if width == bend else ""),
        )
    return table


def cap_table(curves: CostCurves, source: str) -> Table:
    """One drafter: what a draft costs by cap, and the rate to expect; the best of each column is marked."""
    from rich.table import Table

    table = Table(f"{source} cap", "draft ms", *(f"accepts {each:.0%}" for each in ACCEPTANCE))
    predicted = [rates(curves, source, each) for each in ACCEPTANCE]
    best = [best_of(each) for each in predicted]
    for cap in caps_of(curves, source):
        cells = [_marked(each.get(cap), cap == top) for each, top in zip(predicted, best, strict=True)]
        table.add_row(str(cap), f"{(curves.draft_seconds(source, cap) or 0.0) * 1e3:.2f}", *cells)
    return table


def _marked(rate: float | None, best: bool) -> str:
    return "" if rate is None else f"{rate:.2f}x" + (" ◂" if best else "")


def summary(curves: CostCurves) -> str:
    """The knee, the overhead and the numbers of rows measured, in one line."""
    curve, rows = verify_curve(curves), sorted({point.rows for point in curves.verify})
    bend = knee(curve)
    parts = [
        f"a plain round takes {curve[1] * 1e3:.2f} ms, {curves.overhead * 1e3:.2f} ms of it overhead",
        f"the knee is at width {bend}" if bend is not None else "the curve has no knee",
        _rows(rows),
    ]
    return " · ".join(part for part in parts if part)


def _rows(rows: Sequence[int]) -> str:
    return f"measured for {', '.join(map(str, rows))} rows" if len(rows) > 1 else ""


def told(curves: CostCurves) -> dict[str, object]:
    """The curves, their knee and the predicted rates as JSON values."""
    predicted = {
        source: {f"{each:g}": rates(curves, source, each) for each in ACCEPTANCE} for source in curves.draft
    }
    return {"curves": curves.to_json(), "knee": knee(verify_curve(curves)), "predicted": predicted}
