"""Curves as wholes: put together, and what they look like."""

from __future__ import annotations

from dataclasses import replace

from mlx_dspark.foundation.curves import CostCurves, rising

BEND = 0.08
"""A curve that strays less than this from a straight line has no knee."""


def verify_curve(curves: CostCurves, *, depth: int | None = None) -> dict[int, float]:
    """Seconds of a round of one row without its drafting, by width, at `depth` (None: the least); level
    where it would fall."""
    points = [point for point in curves.verify if point.rows == 1]
    depth = min(point.depth for point in points) if depth is None else depth
    return rising({p.width: p.seconds + curves.overhead for p in points if p.depth == depth})


def knee(curve: dict[int, float]) -> int | None:
    """The width after which one more token costs clearly more than before; None where there is none.

    It is the point furthest below the line from the first width to the last (Satopaa et al. 2011, "Finding a
    kneedle in a haystack").
    """
    widths = sorted(curve)
    first, last = widths[0], widths[-1]
    rise = curve[last] - curve[first]
    if rise <= 0 or last == first:
        return None
    below = {
        width: (width - first) / (last - first) - (curve[width] - curve[first]) / rise for width in widths
    }
    best = max(below, key=lambda width: below[width])
    return best if below[best] > BEND else None


def with_rows(curves: CostCurves, more: CostCurves) -> CostCurves:
    """`curves` with what `more` tells of other numbers of rows, which it tells anew."""
    fresh = {point.rows for point in more.verify}
    kept = tuple(point for point in curves.verify if point.rows not in fresh)
    names = [*curves.draft, *(name for name in more.draft if name not in curves.draft)]
    draft = {
        name: (
            *(point for point in curves.draft.get(name, ()) if point.rows not in fresh),
            *more.draft.get(name, ()),
        )
        for name in names
    }
    shift = more.overhead - curves.overhead
    moved = tuple(replace(point, seconds=max(0.0, point.seconds + shift)) for point in more.verify)
    return replace(curves, verify=(*kept, *moved), draft=draft)
