"""`x_mlx_dspark` of several answers: sums, and what happened to any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from mlx_dspark.serving.stats import stats_of
from mlx_dspark.session.result import Result, SourceCount
from tests.tiny_server import tiny_server, tiny_session

ONE = replace(
    Result.fold([]),
    prompt_tokens=5,
    token_ids=(1, 2),
    sources={
        "lookup": SourceCount(2, 4, 2),
        "lookup-long": SourceCount(1, 2, 2),
        "dflash": SourceCount(9, 9, 9),
    },
    drafted=15,
    troubles=("a",),
)
OTHER = replace(ONE, token_ids=(1, 2, 3), context_full=True, troubles=("a", "b"))


@pytest.mark.parametrize("results", [(ONE, OTHER), (OTHER, ONE)])
def test_of_several_answers_counts_are_sums(results: tuple[Result, Result]) -> None:
    told = stats_of(results, (), [5])
    counts = ("completion_tokens", "drafted", "accepted", "lookup_rounds", "target_forwards", "cached_tokens")
    for name in counts:
        assert told[name] == sum(choice[name] for choice in told["choices"]), name
    assert told["lookup_rounds"] == 6
    assert told["troubles"] == ["a", "b"]
    assert told["context_full"]
    assert told["context_tokens"] == 8


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "Hello there, you"], [[5, 6, 7], [8]]])
def test_prompts_count_as_in_usage(prompt: Any, n: int) -> None:
    with tiny_server(tiny_session()) as url:
        body = {"prompt": prompt, "n": n, "max_tokens": 2}
        told = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    stats, usage = told["x_mlx_dspark"], told["usage"]
    assert stats["prompt_tokens"] == usage["prompt_tokens"]
    assert stats["completion_tokens"] == usage["completion_tokens"]
