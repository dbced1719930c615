"""The guard warns of a drafter that lost half of its drafts, as of a wrong slot, and never of a right one."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mlx_dspark.bench import acceptance
from mlx_dspark.bench.acceptance import accepted, samples_of
from mlx_dspark.bench.guard import (
    LEAST_PROMPTS,
    SHARE,
    WIDE,
    GuardVerdict,
    Sample,
    expected_commit,
    judge_acceptance,
    student,
)
from mlx_dspark.bench.stats import VerifyRound
from mlx_dspark.catalog import default_model, shipped
from mlx_dspark.catalog.pair_row import Expected
from mlx_dspark.catalog.pairs import load_registry
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import load_parts

ROW = Expected("dspark", "chat", 4, 3.0)
"""Two of four drafts are accepted."""


def samples(share: float, prompts: int, rounds: int, seed: int) -> list[Sample]:
    """Answers of which `share` of the expected drafts are accepted on average; easy prompts get thrice as
    many as hard ones."""
    dice = random.Random(seed)
    made = []
    for _ in range(prompts):
        chance = 0.5 * share * dice.uniform(0.5, 1.5)
        accepted = [sum(dice.random() < chance for _ in range(4)) for _ in range(rounds)]
        made.append(Sample("chat", tuple(VerifyRound(4, n, n + 1, "dspark") for n in accepted)))
    return made


def judged(share: float, prompts: int, rounds: int, seed: int) -> GuardVerdict:
    return judge_acceptance(samples(share, prompts, rounds, seed), {"chat": ROW})


@pytest.mark.parametrize("prompts", [LEAST_PROMPTS, 8, 24])
def test_a_right_drafter_is_never_low_and_one_at_half_never_fine(prompts: int) -> None:
    for seed in range(40):
        assert judged(1.0, prompts, 30, seed).kind != "low"
        assert judged(0.5, prompts, 30, seed).kind != "fine"


@pytest.mark.parametrize("seed", range(20))
def test_enough_prompts_tell_the_two_apart(seed: int) -> None:
    assert judged(1.0, 24, 30, seed).kind == "fine"
    assert judged(0.5, 24, 30, seed).kind == "low"


@pytest.mark.parametrize("prompts", [6, 16])
def test_at_the_threshold_each_verdict_is_as_rare_as_is_said(prompts: int) -> None:
    """One in a hundred each; that more than 7 of 200 are is itself rarer than one in five hundred."""
    kinds = Counter(judged(SHARE, prompts, 10, seed).kind for seed in range(200))
    assert max(kinds["low"], kinds["fine"]) <= 7


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(4, 3.747), (5, 3.365), (8, 2.896), (15, 2.602), (23, 2.500)]
)
def test_the_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert student(0.99, freedom) == pytest.approx(quantile, rel=0.01)


@pytest.mark.parametrize(("prompts", "rounds"), [(1, 500), (LEAST_PROMPTS - 1, 100), (5, 2)])
def test_few_prompts_or_rounds_are_open_and_say_how_many_tokens_are_needed(prompts: int, rounds: int) -> None:
    verdict = judged(0.1, prompts, rounds, 0)
    assert verdict.kind == "open"
    assert verdict.tokens_needed > 0
    assert str(verdict.tokens_needed) in str(verdict)
    json.dumps(asdict(verdict), allow_nan=False)


def test_prompts_that_happen_to_be_alike_are_not_taken_for_certain() -> None:
    none = [Sample("chat", (VerifyRound(4, 0, 1, "dspark"),))] * LEAST_PROMPTS
    assert judge_acceptance(none, {"chat": ROW}).kind == "open"


def test_nothing_is_said_of_a_content_that_the_row_does_not_know() -> None:
    assert judge_acceptance(samples(0.1, 8, 40, 0), {"code": ROW}).kind == "unknown"
    assert judge_acceptance(samples(0.1, 8, 40, 0), {"all": ROW}).kind == "low"
    assert judge_acceptance([], {"all": ROW}).kind == "unknown"


@pytest.mark.parametrize("loose", [replace(ROW, content="all"), replace(ROW, basis="another model")])
def test_a_loose_expectation_has_a_wider_margin_and_says_what_it_is(loose: Expected) -> None:
    for seed in range(20):
        off, lost = samples(0.65, 24, 30, seed), samples(0.25, 24, 30, seed)
        assert judge_acceptance(off, {loose.content: loose}).kind != "low"
        verdict = judge_acceptance(lost, {loose.content: loose})
        assert (verdict.kind, verdict.threshold) == ("low", WIDE)
        assert f"compared with {loose.basis or 'one mean over contents'}" in str(verdict)
    strict = judge_acceptance(samples(0.25, 24, 30, 0), {"chat": ROW})
    assert (strict.threshold, strict.against) == (SHARE, "")
    assert "compared with" not in str(strict)


def test_what_samples_come_to_is_what_they_are_judged_by() -> None:
    """A run is all of what it is itself expected to be, whatever its rounds drafted."""
    for seed in range(10):
        found = [*samples(1.0, 8, 30, seed), Sample("code", (VerifyRound(2, 1, 2, "dspark"),) * 9)]
        here = accepted(found, "dspark")
        assert [(each.content, each.cap) for each in here] == [("chat", 4), ("code", 2)]
        assert all(sorted(each.reached, reverse=True) == list(each.reached) for each in here)
        verdict = judge_acceptance(found, {each.content: each for each in here})
        assert verdict.share == pytest.approx(1.0)
        assert verdict.threshold == SHARE
    assert accepted([Sample("chat", ())], "dspark") == ()


def test_what_is_expected_of_a_round_follows_its_drafts() -> None:
    assert expected_commit(ROW, 4) == pytest.approx(3.0)
    assert expected_commit(ROW, 0) == 1.0
    assert 1 < expected_commit(ROW, 1) < expected_commit(ROW, 2) < 3.0
    known = Expected("dspark", "chat", 3, 2.0, (0.5, 0.3, 0.2))
    assert [expected_commit(known, n) for n in (1, 2, 3)] == pytest.approx([1.5, 1.8, 2.0])


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("cap", [1, 2])
def test_longer_drafts_than_the_rows_cap_change_no_verdict(cap: int, share: float) -> None:
    """A round that drafts on past the cap accepts more, of which the row says nothing."""
    chance, row = 0.5 * share, Expected("dspark", "chat", cap, sum(0.5**i for i in range(cap + 1)))
    for seed in range(20):
        dice, short, whole = random.Random(seed), [], []
        for _ in range(24):
            runs = [next(i for i in range(8) if i == 7 or dice.random() >= chance) for _ in range(40)]
            whole.append(Sample("chat", tuple(VerifyRound(7, n, n + 1, "dspark") for n in runs)))
            kept = [min(n, cap) for n in runs]
            short.append(Sample("chat", tuple(VerifyRound(cap, n, n + 1, "dspark") for n in kept)))
        found = judge_acceptance(whole, {"chat": row})
        assert found.share == judge_acceptance(short, {"chat": row}).share
        assert found.kind == ("fine" if share == 1 else "low")


@pytest.mark.weights
@pytest.mark.parametrize("change", [{}, {"logits_start": 1}], ids=["right", "wrong slot"])
def test_the_default_pair_in_the_wrong_slot_is_told_and_the_right_one_is_not(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "TOKENS", 64)
    head = tmp_path / "head"
    shutil.copytree(shipped.HOME / default_model.NAME, head)
    config = json.loads((head / "config.json").read_text()) | change
    (head / "config.json").write_text(json.dumps(config))
    loading = LoadSettings(drafter=head)
    pair = load_registry().named(default_model.NAME)
    assert pair is not None
    parts = replace(load_parts(loading), pair=pair)
    found = [each for content in ("code", "math") for each in samples_of(parts, loading, content, range(3))]
    verdict = judge_acceptance(found, pair.expectations("dspark"))
    assert verdict.share is not None
    if change:
        assert verdict.kind == "low", str(verdict)
    else:
        assert verdict.kind != "low", str(verdict)
        assert verdict.share > SHARE, str(verdict)
