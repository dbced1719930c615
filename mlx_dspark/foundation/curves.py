"""What rounds cost on this machine, and what a cap would bring. Numbers in, numbers out; no MLX.

A round verifies `width = cap + 1` tokens per row. Its price is one propose, one round of the target and the
overhead of a round; its yield is `1 + p0 + p0 p1 + ...` tokens, where `p[i]` is the chance that draft `i` is
accepted given those before it (Leviathan et al. 2023, with a chance per position).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import inf
from typing import Any, Self, TypeVar

from mlx_dspark.foundation.errors import BadCurves
from mlx_dspark.foundation.numbers import brief, is_finite, is_whole


@dataclass(frozen=True, slots=True)
class VerifyPoint:
    """One round of the target, timed: forward, accept rule and commit of `width` tokens in each of `rows`
    rows that hold `depth` tokens. `spread` is the relative spread of the samples."""

    rows: int
    width: int
    depth: int
    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """One propose of at most `cap` drafts, with its observe, timed as a VerifyPoint."""

    rows: int
    cap: int
    depth: int
    seconds: float
    spread: float


_Point = TypeVar("_Point", VerifyPoint, DraftPoint)


class _Surface:
    """Seconds over (x, depth), linear between measured points.

    The depth with most points gives the curve over x; the points at other depths say, x by x, how much is
    added there. Less depth than was ever measured costs as much as the least. What falls over x is made
    level first.
    """

    def __init__(self, points: Sequence[tuple[int, int, float]]) -> None:
        measured: dict[int, dict[int, float]] = {}
        for x, depth, seconds in points:
            measured.setdefault(depth, {})[x] = seconds
        by_depth = {depth: rising(curve) for depth, curve in measured.items()}
        self._base = max(by_depth, key=lambda depth: (len(by_depth[depth]), -depth))
        self._curve = by_depth[self._base]
        self._added: dict[int, dict[int, float]] = {}
        for depth, curve in by_depth.items():
            for x, seconds in curve.items():
                added = self._added.setdefault(x, {self._base: 0.0})
                added[depth] = seconds - _on_line(self._curve, x)
        self._added = {x: added for x, added in self._added.items() if len(added) > 1}

    def __call__(self, x: int, depth: int) -> float:
        seconds = _on_line(self._curve, x)
        if self._added and depth != self._base:
            at_depth = {w: _on_line(added, max(depth, min(added))) for w, added in self._added.items()}
            seconds += _on_line(at_depth, x)
        return max(seconds, 0.0)


def rising(curve: Mapping[int, float]) -> dict[int, float]:
    """The curve with no point above a later one: a round can be made wider by padding, so none needs to take
    longer than a wider one."""
    least, found = inf, {}
    for x in sorted(curve, reverse=True):
        least = found[x] = min(least, curve[x])
    return dict(sorted(found.items()))


def _on_line(known: Mapping[int, float], x: int) -> float:
    """The value at `x`, else on the line through its neighbours, which falls no further beyond the last."""
    if x in known:
        return known[x]
    if len(known) == 1:
        return next(iter(known.values()))
    places = sorted(known)
    after = next((i for i, place in enumerate(places) if place > x), len(places) - 1)
    low, high = places[max(0, after - 1)], places[max(1, after)]
    slope = (known[high] - known[low]) / (high - low)
    if x > high:
        return known[high] + max(0.0, slope) * (x - high)
    return known[low] + (slope if x > low else max(0.0, slope)) * (x - low)


@dataclass(frozen=True)
class CostCurves:
    """Round prices of one pair on one machine. `draft` is by source name; `overhead` are the seconds a round
    takes besides; `measured_at` is unix time.

    Raises BadCurves naming the field when a value is none that a measurement gives.
    """

    verify: tuple[VerifyPoint, ...]
    draft: Mapping[str, tuple[DraftPoint, ...]]
    overhead: float
    measured_at: float

    def __post_init__(self) -> None:
        _require(bool(self.verify), "verify", self.verify, "at least one point")
        for i, point in enumerate(self.verify):
            _check_point(point, f"verify[{i}]", width=1)
        for name, points in self.draft.items():
            _require(bool(points), f"draft.{name}", points, "at least one point")
            for i, point in enumerate(points):
                _check_point(point, f"draft.{name}[{i}]", cap=1)
        for name in ("overhead", "measured_at"):
            value = getattr(self, name)
            _require(is_finite(value) and value >= 0, name, value, "a number of 0 or more")

    def verify_seconds(self, width: int, *, depth: int = 0, rows: int = 1) -> float | None:
        """Seconds of one round of the target, interpolated in width and depth; None where a round of so many
        rows was never measured."""
        surface = self._verify.get(rows)
        return None if surface is None else surface(width, depth)

    def draft_seconds(self, source: str, cap: int, *, depth: int = 0, rows: int = 1) -> float | None:
        """Seconds of one propose of at most `cap` drafts, 0 for none; None where it was never measured."""
        if cap == 0:
            return 0.0
        surface = self._draft.get(source, {}).get(rows)
        return None if surface is None else surface(cap, depth)

    def round_seconds(self, cap: int, *, source: str, depth: int = 0, rows: int = 1) -> float | None:
        """Seconds of one round at this cap; at 0 a plain round, without drafter. None where not measured."""
        verify = self.verify_seconds(cap + 1, depth=depth, rows=rows)
        draft = self.draft_seconds(source, cap, depth=depth, rows=rows)
        return None if verify is None or draft is None else verify + draft + self.overhead

    def speedup(
        self, acceptance: Sequence[float], cap: int, *, source: str, depth: int = 0, rows: int = 1
    ) -> float | None:
        """Tokens per second at this cap as a multiple of plain decoding, 1.0 at cap 0; None where not
        measured. `acceptance[i]` is the chance that draft `i` is accepted given those before it."""
        plain = self.round_seconds(0, source=source, depth=depth, rows=rows)
        seconds = self.round_seconds(cap, source=source, depth=depth, rows=rows)
        if plain is None or seconds is None or not seconds:
            return None
        return expected_tokens(acceptance, cap) * plain / seconds

    def best_cap(
        self, acceptance: Sequence[float], *, source: str, depth: int = 0, rows: int = 1, limit: int
    ) -> int:
        """The cap from 0 to `limit` with the greatest speedup, the least of equals; 0 where not measured."""
        best, most = 0, 1.0
        for cap in range(1, limit + 1):
            gain = self.speedup(acceptance, cap, source=source, depth=depth, rows=rows)
            if gain is not None and gain > most:
                best, most = cap, gain
        return best

    @cached_property
    def _verify(self) -> dict[int, _Surface]:
        return _surfaces((p.rows, p.width, p.depth, p.seconds) for p in self.verify)

    @cached_property
    def _draft(self) -> dict[str, dict[int, _Surface]]:
        return {
            name: _surfaces((p.rows, p.cap, p.depth, p.seconds) for p in points)
            for name, points in self.draft.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Plain lists, numbers and names, which `from_json` takes."""
        return {
            "verify": [asdict(point) for point in self.verify],
            "draft": {name: [asdict(point) for point in points] for name, points in self.draft.items()},
            "overhead": self.overhead,
            "measured_at": self.measured_at,
        }

    @classmethod
    def from_json(cls, recorded: Any) -> Self:
        """Curves from what `to_json` gave. Raises BadCurves naming the field that is missing or damaged."""
        names = [field.name for field in fields(cls)]
        _require_names(recorded, names, "curves")
        _require(isinstance(recorded["verify"], list), "verify", recorded["verify"], "a list of points")
        _require(isinstance(recorded["draft"], dict), "draft", recorded["draft"], "points by source name")
        for name, points in recorded["draft"].items():
            _require(isinstance(points, list), f"draft.{name}", points, "a list of points")
        return cls(
            _points(VerifyPoint, recorded["verify"], "verify"),
            {name: _points(DraftPoint, each, f"draft.{name}") for name, each in recorded["draft"].items()},
            recorded["overhead"],
            recorded["measured_at"],
        )


def expected_tokens(acceptance: Sequence[float], cap: int) -> float:
    """Tokens a round of `cap` drafts commits on average; past its end the last of `acceptance` holds."""
    tokens, survival = 1.0, 1.0
    for i in range(cap if acceptance else 0):
        survival *= acceptance[min(i, len(acceptance) - 1)]
        tokens += survival
    return tokens


def _surfaces(points: Iterable[tuple[int, int, int, float]]) -> dict[int, _Surface]:
    """By rows, from (rows, x, depth, seconds)."""
    grouped: dict[int, list[tuple[int, int, float]]] = {}
    for rows, x, depth, seconds in points:
        grouped.setdefault(rows, []).append((x, depth, seconds))
    return {rows: _Surface(each) for rows, each in grouped.items()}


def _points(kind: type[_Point], recorded: Sequence[Any], where: str) -> tuple[_Point, ...]:
    names = [field.name for field in fields(kind)]
    for i, each in enumerate(recorded):
        _require_names(each, names, f"{where}[{i}]")
    return tuple(kind(**{name: each[name] for name in names}) for each in recorded)


def _check_point(point: VerifyPoint | DraftPoint, where: str, **least: int) -> None:
    for name, lowest in {"rows": 1, "depth": 0, **least}.items():
        value = getattr(point, name)
        _require(is_whole(value) and value >= lowest, f"{where}.{name}", value, f"an integer from {lowest}")
    seconds, spread = point.seconds, point.spread
    _require(is_finite(seconds) and seconds >= 0, f"{where}.seconds", seconds, "a number of 0 or more")
    _require(is_finite(spread) and spread >= 0, f"{where}.spread", spread, "a number of 0 or more")


def _require_names(recorded: Any, names: Sequence[str], where: str) -> None:
    _require(isinstance(recorded, dict), where, recorded, f"a table of {', '.join(names)}")
    for name in names:
        _require(name in recorded, f"{where}.{name}", None, "a value")


def _require(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise BadCurves(
            f"{name} is {brief(value)}, which no measurement gives.",
            f"Measure again; this takes {want}.",
            field=name,
        )
