"""The functional face: every function writes what plain decoding writes, and says how it got there."""

from __future__ import annotations

from pathlib import Path
from time import time
from typing import Any

import pytest

import mlx_dspark
from mlx_dspark.engine.times import RoundTimes
from mlx_dspark.foundation.curves import CostCurves, VerifyPoint
from mlx_dspark.foundation.errors import DrafterMismatch, UsageError
from mlx_dspark.session import calibrate
from mlx_dspark.session.calibrate import Calibration
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark

PROMPT = "a" * 20
"""The tiny model goes on in repetitions, so that lookup finds drafts."""
OPTIONS = {"max_new_tokens": 24, "chat_template": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("functions")
    save_tiny(home / "model")
    save_tiny_dspark(home / "dspark")
    save_tiny_dflash(home / "dflash")
    return home


@pytest.fixture(scope="module", autouse=True)
def _own_cache(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_DSPARK_CACHE_DIR", str(folder / "cache"))
        yield


@pytest.fixture(scope="module")
def plain(folder: Path) -> mlx_dspark.Result:
    target, tokenizer, _, _ = mlx_dspark.load_pair(folder / "model", mode="baseline")
    return mlx_dspark.greedy_generate(target, tokenizer, PROMPT, **OPTIONS)


def test_plain_decoding_has_one_round_a_token(plain: mlx_dspark.Result) -> None:
    assert (plain.mode, plain.num_tokens, plain.finish_reason) == ("baseline", 24, "length")
    assert plain.num_rounds - plain.prefill_rounds == 23
    assert (plain.drafted, plain.accept_lengths, plain.cap) == (0, (), 0)


@pytest.mark.parametrize("drafter", [None, "dspark", "dflash"])
@pytest.mark.parametrize("max_draft_tokens", [None, "auto", 0, 2])
def test_speculative_text_is_plain_text(
    folder: Path, plain: mlx_dspark.Result, drafter: str | None, max_draft_tokens: Any
) -> None:
    named = folder / drafter if drafter else None
    target, tokenizer, loaded, config = mlx_dspark.load_pair(folder / "model", named)
    assert config["model_type"] == "llama"
    result = mlx_dspark.speculative_generate(
        target, tokenizer, loaded, PROMPT, max_draft_tokens=max_draft_tokens, **OPTIONS
    )
    assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
    assert result.mode == (drafter or "lookup")
    assert len(result.accept_lengths) == sum(count.rounds for count in result.sources.values())
    assert all(length >= 1 for length in result.accept_lengths)
    if max_draft_tokens == 2:
        assert result.cap <= 2
    if max_draft_tokens in (0, 2):
        assert result.drafted > 0
        looked_up = [count.accepted for name, count in result.sources.items() if name.startswith("lookup")]
        assert drafter == "dflash" or sum(looked_up) > 0


def test_dflash_functions_take_dflash_drafters_only(folder: Path, plain: mlx_dspark.Result) -> None:
    target, tokenizer, drafter, _ = mlx_dspark.load_dflash_pair(folder / "model", folder / "dflash")
    result = mlx_dspark.dflash_generate(target, tokenizer, drafter, PROMPT, max_draft_tokens=0, **OPTIONS)
    assert result.token_ids == plain.token_ids
    assert set(result.sources) == {"dflash"}
    with pytest.raises(DrafterMismatch, match="dspark"):
        mlx_dspark.load_dflash_pair(folder / "model", folder / "dspark")
    with pytest.raises(UsageError, match="drafter"):
        mlx_dspark.dflash_generate(target, tokenizer, None, PROMPT)


def test_lookup_needs_no_drafter(folder: Path, plain: mlx_dspark.Result) -> None:
    target, tokenizer, _, _ = mlx_dspark.load_pair(folder / "model", mode="baseline")
    result = mlx_dspark.lookup_generate(target, tokenizer, PROMPT, max_draft_tokens=0, **OPTIONS)
    assert (result.token_ids, result.mode) == (plain.token_ids, "lookup")
    assert result.accepted > 0


def costs(width_share: float) -> CostCurves:
    """Of rounds whose every further token costs such a share of a plain one."""
    points = tuple(VerifyPoint(1, width, 0, 1 + width_share * (width - 1), 0.0) for width in (1, 2, 4, 8, 33))
    return CostCurves(points, {}, 0.0, time())


@pytest.mark.parametrize("max_draft_tokens", [None, "auto"])
@pytest.mark.parametrize("share", [0.0, 3.0])
def test_lookup_goes_by_what_was_measured_of_the_target(
    folder: Path,
    plain: mlx_dspark.Result,
    share: float,
    max_draft_tokens: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no draft could pay, all rounds but a few probes are plain; where it is free, none is parked."""
    target, tokenizer, _, _ = mlx_dspark.load_pair(folder / "model", mode="baseline")
    monkeypatch.setitem(calibrate._OF_TARGET, target, Calibration(costs(share), "remembered"))
    monkeypatch.setattr(RoundTimes, "_note", lambda *_: None)
    monkeypatch.setattr(RoundTimes, "samples", lambda *_: RoundTimes.TRUSTED)
    result = mlx_dspark.lookup_generate(
        target, tokenizer, PROMPT, max_draft_tokens=max_draft_tokens, **OPTIONS
    )
    assert (result.token_ids, result.mode) == (plain.token_ids, "lookup")
    if share:
        assert result.parked_rounds > 0
        assert sum(count.rounds for count in result.sources.values()) <= 4
    else:
        assert result.parked_rounds == 0
        assert result.accepted > 0


@pytest.mark.parametrize("wrong", [-1, "many", 1.5, True])
def test_bad_caps_are_refused(folder: Path, wrong: Any) -> None:
    target, tokenizer, _, _ = mlx_dspark.load_pair(folder / "model", mode="baseline")
    with pytest.raises(UsageError, match="max_draft"):
        mlx_dspark.lookup_generate(target, tokenizer, PROMPT, max_draft_tokens=wrong)


def test_a_session_answers_as_the_functions_do(folder: Path, plain: mlx_dspark.Result) -> None:
    session = mlx_dspark.load(folder / "model")
    assert session.generate(PROMPT, **OPTIONS).token_ids == plain.token_ids
    assert session.mode == "lookup"
    with pytest.raises(UsageError, match="drafter_bitz"):
        mlx_dspark.load(folder / "model", drafter_bitz=3)


def test_a_named_mode_must_be_the_drafters(folder: Path) -> None:
    for mode, drafter in (("dspark", "dflash"), ("dflash", "dspark")):
        with pytest.raises(DrafterMismatch, match=f"--mode {drafter}"):
            mlx_dspark.load(folder / "model", drafter=folder / drafter, mode=mode)
        assert mlx_dspark.load(folder / "model", drafter=folder / drafter).mode == drafter


def test_lookup_length_beside_a_drafter_that_works_alone_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="lookup_long_draft"):
        mlx_dspark.load(folder / "model", drafter=folder / "dflash", lookup_long_draft=8)
