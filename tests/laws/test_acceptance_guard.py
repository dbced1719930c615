"""The guard warns of a drafter that is accepted far too seldom, as of a spoiled one, never on noise."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_dspark.bench import acceptance
from mlx_dspark.bench.acceptance import guard_now
from mlx_dspark.bench.guard import SHARE, Sample, expected_commit, judge_acceptance
from mlx_dspark.bench.stats import VerifyRound
from mlx_dspark.catalog import default_model, shipped
from mlx_dspark.catalog.pair_row import Expected
from mlx_dspark.catalog.pairs import load_registry
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import load_parts

ROW = Expected("dspark", "chat", 4, 3.0)


def samples(chance: float, prompts: int, rounds: int, seed: int, *, cap: int = 4) -> list[Sample]:
    """Answers whose drafts are each accepted with `chance`, given those before; prompts differ among them."""
    dice = random.Random(seed)
    made = []
    for _ in range(prompts):
        own = min(0.95, chance * dice.uniform(0.85, 1.15))
        accepted = [next((i for i in range(cap) if dice.random() > own), cap) for _ in range(rounds)]
        made.append(Sample("chat", tuple(VerifyRound(cap, n, n + 1, "dspark") for n in accepted)))
    return made


HEALTHY = 0.76
"""About the chance that gives the row's accept length."""


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_is_never_low_and_a_broken_one_is(seed: int) -> None:
    assert judge_acceptance(samples(HEALTHY, 8, 40, seed), {"chat": ROW}).kind == "fine"
    assert judge_acceptance(samples(0.2, 8, 40, seed), {"chat": ROW}).kind == "low"


@pytest.mark.parametrize("seed", range(20))
def test_a_run_at_the_edge_is_not_warned_of(seed: int) -> None:
    edge = next(c / 100 for c in range(100) if sum((c / 100) ** i for i in range(5)) >= SHARE * 3.0)
    assert judge_acceptance(samples(edge, 6, 15, seed), {"chat": ROW}).kind != "low"


@pytest.mark.parametrize(("prompts", "rounds"), [(1, 500), (3, 100), (8, 2)])
def test_few_prompts_or_rounds_are_open_and_say_how_many_tokens_are_needed(prompts: int, rounds: int) -> None:
    verdict = judge_acceptance(samples(0.1, prompts, rounds, 0), {"chat": ROW})
    assert verdict.kind == "open"
    assert verdict.tokens_needed > 0
    assert str(verdict.tokens_needed) in str(verdict)


def test_nothing_is_said_of_a_content_that_the_row_does_not_know() -> None:
    assert judge_acceptance(samples(0.1, 8, 40, 0), {"code": ROW}).kind == "unknown"
    assert judge_acceptance(samples(0.1, 8, 40, 0), {"all": ROW}).kind == "low"
    assert judge_acceptance([], {"all": ROW}).kind == "unknown"


def test_what_is_expected_of_a_round_follows_its_drafts() -> None:
    assert expected_commit(ROW, 4) == pytest.approx(3.0)
    assert expected_commit(ROW, 0) == 1.0
    assert 1 < expected_commit(ROW, 1) < expected_commit(ROW, 2) < 3.0
    known = Expected("dspark", "chat", 3, 2.0, (0.5, 0.3, 0.2))
    assert [expected_commit(known, n) for n in (1, 2, 3)] == pytest.approx([1.5, 1.8, 2.0])


@pytest.mark.weights
@pytest.mark.parametrize("spoil", ["", "taps"])
def test_a_spoiled_default_pair_is_told_and_the_right_one_is_not(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "PROMPTS", 2)
    monkeypatch.setattr(acceptance, "TOKENS", 48)
    head = tmp_path / "head"
    shutil.copytree(shipped.HOME / default_model.NAME, head)
    config = json.loads((head / "config.json").read_text())
    if spoil == "taps":
        config["target_layer_ids"] = [0, 1, 2, 3, 4]
    (head / "config.json").write_text(json.dumps(config))
    loading = LoadSettings(drafter=head)
    parts = replace(load_parts(loading), pair=load_registry().named(default_model.NAME))
    verdict = guard_now(parts, loading)
    assert verdict.kind == ("low" if spoil else "fine"), str(verdict)
