"""On the real default model, every mode's greedy ids are stock mlx-lm's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from tests.default_model import assert_same_or_tie, parts, stock
from tests.fakes import stock_greedy

pytestmark = pytest.mark.weights

NEW = 24
PROMPTS = {
    "chat": "Why is the sky blue?",
    "repeat": "Repeat this line three times: alpha beta gamma delta epsilon zeta",
    "code": "Write add(a, b) in Python.",
}


@lru_cache
def prompt_ids(name: str) -> tuple[int, ...]:
    return encode_prompt(parts().tokenizer, PROMPTS[name])


@lru_cache
def truth(name: str) -> tuple[int, ...]:
    return tuple(stock_greedy(stock(), prompt_ids(name), NEW))


def drafter_of(mode: str) -> Any:
    """The shipped drafter alone or behind lookup, lookup alone, or None."""
    if mode == "plain":
        return None
    if mode == "lookup":
        return LookupDrafter(min_n=2, max_n=4)
    return parts("dspark", lookup_drafts=mode == "lookup+shipped").drafter


def ids_of(drafter: Any, max_draft: Any, names: list[str]) -> list[list[int]]:
    if drafter is not None:
        drafter.bind(parts().target)
    sources = drafter.sources if drafter is not None else ()
    engine = Engine(parts().target, drafter, cap=cap_policy(max_draft, sources))
    answers: list[list[int]] = [[] for _ in names]
    for index, event in engine.run([GenerateRequest(prompt_ids(name), NEW) for name in names]):
        if isinstance(event, Committed):
            answers[index] += event.tokens
    return answers


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize(
    ("mode", "max_draft"),
    [
        *[("plain", None), ("lookup", None), ("lookup", "auto"), ("lookup", 0), ("lookup", 3)],
        *[("shipped", 0), ("shipped", 2), ("lookup+shipped", "auto")],
    ],
)
def test_greedy_ids_equal_stock(name: str, mode: str, max_draft: Any) -> None:
    (ours,) = ids_of(drafter_of(mode), max_draft, [name])
    assert_same_or_tie(prompt_ids(name), ours, truth(name))


@pytest.mark.parametrize("mode", ["plain", "lookup", "shipped"])
def test_a_batch_equals_its_rows(mode: str) -> None:
    names = list(PROMPTS)
    for name, ours in zip(names, ids_of(drafter_of(mode), 0, names), strict=True):
        assert_same_or_tie(prompt_ids(name), ours, truth(name))
