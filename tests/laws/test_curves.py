"""Cost curves: interpolation, the price of a cap, and a round trip through JSON. Arithmetic only."""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dspark.calibration.shape import verify_curve
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint, expected_tokens
from mlx_dspark.foundation.errors import BadCurves

WIDTHS = (1, 2, 4, 8, 16)


def curves(base: float = 10.0, slope: float = 1.0, deep: float = 0.001) -> CostCurves:
    """Verify `base + slope width + deep width depth`, measured at all widths shallow and two widths deep."""
    verify = [VerifyPoint(1, w, 128, base + slope * w + deep * w * 128, 0.01) for w in WIDTHS]
    verify += [VerifyPoint(1, w, 4096, base + slope * w + deep * w * 4096, 0.01) for w in (1, 8)]
    draft = {"dspark": tuple(DraftPoint(1, cap, 128, 2.0 + 0.5 * cap, 0.01) for cap in (1, 4, 7))}
    return CostCurves(tuple(verify), draft, 0.25, 1e9)


@pytest.mark.parametrize("width", [1, 3, 7, 8, 13, 16, 33])
@pytest.mark.parametrize("depth", [0, 128, 1000, 4096, 30000])
def test_between_and_beyond_points_a_straight_surface_is_itself(width: int, depth: int) -> None:
    wanted = 10.0 + width + 0.001 * width * max(depth, 128)
    assert curves().verify_seconds(width, depth=depth) == pytest.approx(wanted)


def test_a_point_that_was_measured_is_given_back() -> None:
    jagged = (9.0, 13.0, 16.0, 30.0, 31.0)
    known = CostCurves(
        tuple(VerifyPoint(2, w, 0, s, 0.0) for w, s in zip(WIDTHS, jagged, strict=True)), {}, 0.0, 0.0
    )
    assert [known.verify_seconds(w, rows=2) for w in WIDTHS] == list(jagged)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=5, max_size=5), st.floats(0.0, 1.0))
def test_no_curve_falls_and_no_cap_gains_more_than_its_tokens(times: list[float], chance: float) -> None:
    verify = tuple(
        VerifyPoint(1, w, d, s, 0.1) for d in (0, 4096) for w, s in zip(WIDTHS, times, strict=True)
    )
    known = CostCurves(verify, {"dspark": (DraftPoint(1, 4, 0, 0.0, 0.1),)}, 0.0, 0.0)
    prices = [known.verify_seconds(width) or 0.0 for width in range(1, 40)]
    assert all(later >= 0.999 * sooner for sooner, later in pairwise(prices))
    for depth in (0, 2000, 4096):
        for cap in range(1, 16):
            gain = known.speedup([chance], cap, source="dspark", depth=depth)
            assert gain is not None
            assert gain <= 1.001 * expected_tokens([chance], cap)
    told = verify_curve(known)
    assert sorted(told.values()) == list(told.values())
    assert list(told.values()) == [min(times[i:]) for i in range(len(times))]


def test_what_was_never_measured_has_no_price() -> None:
    known = curves()
    assert known.verify_seconds(4, rows=2) is None
    assert known.draft_seconds("lookup", 4) is None
    assert known.round_seconds(4, source="lookup") is None
    assert known.speedup([0.5], 4, source="lookup") is None
    assert known.best_cap([1.0], source="lookup", limit=9) == 0
    assert known.best_cap([1.0], source="dspark", rows=3, limit=7) == 0


@pytest.mark.parametrize("cap", range(8))
def test_a_round_is_draft_verify_and_overhead(cap: int) -> None:
    known = curves(deep=0.0)
    draft = 2.0 + 0.5 * cap if cap else 0.0
    assert known.round_seconds(cap, source="dspark") == pytest.approx(draft + 10 + cap + 1 + 0.25)
    gain = known.speedup([0.8], cap, source="dspark")
    assert gain == pytest.approx(
        sum(0.8**i for i in range(cap + 1)) * 11.25 / (draft + 11.25 + cap) if cap else 1.0
    )


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("slope", [0.0, 0.3, 3.0, 11.0])
def test_the_best_cap_beats_every_other_and_plain(chance: float, slope: float) -> None:
    known = curves(slope=slope)
    best = known.best_cap([chance], source="dspark", limit=7)
    gains = [known.speedup([chance], cap, source="dspark") or 0.0 for cap in range(8)]
    assert gains[best] == max(gains) >= 1.0
    assert best == gains.index(max(gains))


def test_depth_narrows_the_best_cap() -> None:
    known = curves(slope=0.1, deep=0.001)
    shallow, deep = (known.best_cap([0.8], source="dspark", depth=d, limit=7) for d in (0, 100_000))
    assert deep < shallow


def test_chances_hold_past_their_end() -> None:
    assert expected_tokens([0.5, 0.25], 3) == 1 + 0.5 + 0.125 + 0.03125
    assert expected_tokens([], 3) == 1.0


def test_json_gives_the_same_curves() -> None:
    known = curves()
    assert CostCurves.from_json(json.loads(json.dumps(known.to_json()))) == known


def _damages() -> list[tuple[str, Any]]:
    return [
        ("verify", []),
        ("verify", {}),
        ("draft", []),
        ("draft", {"dspark": 3}),
        ("draft", {"dspark": []}),
        ("overhead", -1.0),
        ("overhead", math.nan),
        ("measured_at", None),
        ("verify.0.width", 0),
        ("verify.0.width", 1.5),
        ("verify.0.rows", True),
        ("verify.0.seconds", "1"),
        ("verify.0.seconds", math.inf),
        ("verify.0.spread", -0.1),
        ("draft.dspark.0.cap", 0),
        ("draft.dspark.0", None),
    ]


@pytest.mark.parametrize(("where", "value"), _damages())
@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_damage_is_refused_by_name(where: str, value: Any, gone: bool) -> None:
    recorded: Any = copy.deepcopy(curves().to_json())
    *path, last = where.split(".")
    at = recorded
    for step in path:
        at = at[int(step) if isinstance(at, list) else step]
    key: Any = int(last) if isinstance(at, list) else last
    if gone and isinstance(at, dict):
        del at[key]
    else:
        at[key] = value
    with pytest.raises(BadCurves, match=where.split(".")[0]):
        CostCurves.from_json(recorded)


@pytest.mark.parametrize("other", [None, [], "curves", 3])
def test_anything_else_is_refused(other: Any) -> None:
    with pytest.raises(BadCurves, match="curves"):
        CostCurves.from_json(other)
