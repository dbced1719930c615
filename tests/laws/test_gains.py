"""Predicted and observed rates against plain decoding are folds of the rounds. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlx_dspark.foundation.events import UNKNOWN_OUTLOOK, Outlook, RoundReport
from mlx_dspark.session.gains import Gains, rounds_by_cap


def rounds(*seen: tuple[float, int, Outlook], begun_at: float = 5.0) -> list[RoundReport]:
    """From seconds, tokens committed, and outlook of each."""
    reports, clock = [], begun_at
    for seconds, committed, outlook in seen:
        drafted = 4 if committed > 1 else 0
        reports.append(
            RoundReport(
                clock,
                clock + seconds,
                1,
                drafted + 1,
                1,
                4,
                drafted,
                committed - 1,
                committed,
                9,
                outlook=outlook,
            )
        )
        clock += seconds
    return reports


def test_a_plain_answer_is_as_fast_as_plain() -> None:
    gains = Gains.of(rounds(*[(2.0, 1, Outlook(1.0, 2.0))] * 5), 5.0)
    assert (gains.predicted, gains.observed) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("committed", [[1, 5, 3], [2, 2], [5]])
def test_observed_is_tokens_over_seconds_against_one_over_a_plain_round(committed: Sequence[int]) -> None:
    seen = [(3.0, count, Outlook(None, 2.0)) for count in committed]
    rate = sum(committed) / (3.0 * len(committed))
    gains = Gains.of(rounds(*seen), 5.0)
    assert gains.predicted is None
    assert gains.observed == pytest.approx(rate / (1 / 2.0))


def test_no_answer_gains_more_than_the_tokens_of_its_rounds() -> None:
    """Plain rounds that were timed beside other work, and drafts afterwards without it."""
    hurried = rounds((1.0, 2, Outlook(1.5, 1.6)), (1.0, 1, Outlook(1.5, 1.6)))
    assert Gains.of(hurried, 5.0).observed == pytest.approx(1.5)


def test_predicted_is_averaged_over_time() -> None:
    gains = Gains.of(rounds((1.0, 1, Outlook(1.0, 1.0)), (3.0, 5, Outlook(2.0, 1.0))), 5.0)
    assert gains.predicted == pytest.approx((1.0 * 1 + 2.0 * 3) / 4)


def test_rounds_without_a_plain_price_are_left_out_and_none_tells_nothing() -> None:
    known = (2.0, 3, Outlook(1.5, 1.0))
    assert Gains.of(rounds((7.0, 1, UNKNOWN_OUTLOOK), known), 5.0) == Gains(1.5, 1.5)
    assert Gains.of(rounds((7.0, 1, UNKNOWN_OUTLOOK)), 5.0) == Gains()
    assert Gains.of([], 0.0) == Gains()


def test_a_round_launched_ahead_is_charged_from_the_landing_before_it() -> None:
    ahead = RoundReport(5.5, 8.0, 1, 1, 1, 0, 0, 0, 1, 9, outlook=Outlook(1.0, 2.0))
    assert Gains.of([ahead], 6.0).observed == pytest.approx(1.0)


def test_rounds_are_counted_by_the_cap_they_drafted_under() -> None:
    assert rounds_by_cap(rounds((1.0, 1, UNKNOWN_OUTLOOK), (1.0, 3, UNKNOWN_OUTLOOK))) == {0: 1, 4: 1}
