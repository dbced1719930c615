"""How long lookup drafts, on what it found in real answers and on machines that are not at hand."""

from __future__ import annotations

import pytest

from benchmarks.lookup_traces import PINNED, gain, recorded_segments, replayed
from benchmarks.simulated_machines import MACHINES
from mlx_dspark.drafters.lookup import LOOKUP, LOOKUP_LONG, LookupDrafter
from mlx_dspark.engine.caps import MaxDraft, cap_policy
from mlx_dspark.foundation.caps import FixedCaps

SOURCES = LookupDrafter().sources
ANSWERS = recorded_segments()


@pytest.mark.parametrize("max_draft", ["auto", None])
@pytest.mark.parametrize("content", ANSWERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_length_of_a_lookup_draft_follows_acceptance_and_prices(
    machine: str, content: str, max_draft: MaxDraft
) -> None:
    """No pinned cap does much better; short answers are over before much is learnt of them."""
    truth, answers = MACHINES[machine].curves(), ANSWERS[content]
    reached = gain(cap_policy(max_draft, SOURCES, curves=truth), truth, answers)
    best = max(gain(cap_policy(cap, SOURCES), truth, answers) for cap in (*PINNED, 0))
    long = sum(len(answer.runs) for answer in answers) >= 500
    assert reached >= (0.95 if long else 0.8) * max(1.0, best)
    assert reached >= (0.98 if long else 0.93)


def test_drafts_after_a_long_match_are_as_long_as_before_where_width_is_nearly_free() -> None:
    truth, answers = MACHINES["M4 Pro, 8-bit 27B"].curves(), ANSWERS["edit"]
    whole = gain(FixedCaps({LOOKUP: 6, LOOKUP_LONG: 32}), truth, answers)
    assert gain(cap_policy(None, SOURCES, curves=truth), truth, answers) >= 0.98 * whole


def test_lookup_drafts_little_before_a_cliff() -> None:
    """A third draft costs half of a plain round there."""
    truth = MACHINES["M5 Max, 8-bit 27B"].curves()
    last = replayed(cap_policy(None, SOURCES, curves=truth), truth, ANSWERS["math"]).stretches[-1].caps
    assert sum(rounds for cap, rounds in last.items() if cap > 2) <= 0.1 * sum(last.values())
    assert last[2] > last.get(1, 0)
