"""Caps against their bars on requests that no policy was tuned on; `benchmarks/policy_bars.py` draws more."""

from __future__ import annotations

import pytest

from benchmarks.policy_bars import ALTOGETHER, OF_ORACLE, OF_PLAIN, WRONG, Request

SEEDS = range(31_000_000, 31_000_010)
REQUESTS = {seed: Request.drawn(seed) for seed in SEEDS}


@pytest.mark.parametrize("max_draft", ["auto", "derived"])
@pytest.mark.parametrize("wrong", WRONG)
def test_no_request_loses_to_plain_decoding_whatever_the_curves_say(wrong: str, max_draft: str) -> None:
    for request in REQUESTS.values():
        outcome = request.run(max_draft, wrong)
        assert outcome.altogether >= ALTOGETHER, request.seed
        assert outcome.warm >= OF_PLAIN - (0.0 if wrong == "right" else 0.005), request.seed


def test_auto_comes_near_the_best_cap_of_nearly_every_segment() -> None:
    """A content that follows a bad one is told from it late where a probe is dear, so a few stay below."""
    shares = [
        share
        for wrong in WRONG
        if wrong != "none"
        for request in REQUESTS.values()
        for share in request.run("auto", wrong).of_oracle
    ]
    assert sum(shares) / len(shares) >= 0.97
    assert sum(share < OF_ORACLE for share in shares) <= 0.12 * len(shares)
    assert min(shares) >= 0.7
