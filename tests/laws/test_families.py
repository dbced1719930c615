"""Every family whose states are attention states: text equals stock mlx-lm's, states equal a fresh prefill.

The windows are of 16 tokens; prompts end before them, at their edges and past them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.contracts import Drafter, Logits
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.state.layout import Layout
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, TextOracle, stock_greedy
from tests.tiny import VOCAB, tiny_config, tiny_family

NEW = 40
FAMILIES = ["gemma2", "gemma3_text", "gemma4_text", "gpt_oss"]
PROMPTS = [[(7 * i + 31 * n) % 350 + 5 for i in range(n)] for n in (10, 15, 16, 17, 40)]

families = pytest.mark.parametrize("family", FAMILIES)
layouts = pytest.mark.parametrize("layout", Layout)
qualities = pytest.mark.parametrize("right", [1.0, 0.7, 0.0], ids=["always-right", "70%", "always-wrong"])


@lru_cache
def model_of(family: str) -> Any:
    return tiny_family(family, seed=1)


@lru_cache
def target_for(family: str) -> DenseTarget:
    return target_of(model_of(family), tiny_config(family))


@lru_cache
def truth(family: str) -> list[list[int]]:
    return [stock_greedy(model_of(family), prompt, NEW) for prompt in PROMPTS]


def scripted(family: str, right: float) -> ScriptedDrafter:
    oracle = TextOracle([[*p, *t] for p, t in zip(PROMPTS, truth(family), strict=True)])
    return ScriptedDrafter(oracle, right, vocab=VOCAB, ragged=True)


def ids_of(
    family: str,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    new: int = NEW,
    cap: int = 5,
    **options: Any,
) -> list[list[int]]:
    engine = Engine(target_for(family), drafter, cap=FixedCaps({"scripted": cap, "lookup": cap}), **options)
    answers: list[list[int]] = [[] for _ in prompts]
    for index, event in engine.run([GenerateRequest(tuple(p), new) for p in prompts]):
        if isinstance(event, Committed):
            answers[index] += event.tokens
    return answers


@families
@pytest.mark.parametrize("rows", [1, 2, 5])
@layouts
def test_plain_decoding_equals_stock(
    family: str, rows: int, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_for(family), "layout", layout)
    together = layout is Layout.RECTANGLE
    assert ids_of(family, None, PROMPTS[-rows:], rectangle=together) == truth(family)[-rows:]


@families
@qualities
@pytest.mark.parametrize(("rows", "cap", "chunk"), [(1, 3, 512), (2, 16, 7), (5, 20, 16)])
def test_any_draft_equals_stock(family: str, right: float, rows: int, cap: int, chunk: int) -> None:
    for part in (slice(None, rows), slice(-rows, None))[: 1 + (rows < 5)]:
        answers = ids_of(family, scripted(family, right), PROMPTS[part], cap=cap, prefill_chunk=chunk)
        assert answers == truth(family)[part]


@families
@pytest.mark.parametrize("rows", [1, 4])
def test_lookup_equals_stock(family: str, rows: int) -> None:
    drafter = LookupDrafter(min_n=1, max_n=2)
    drafter.bind(target_for(family))
    assert ids_of(family, drafter, PROMPTS[-rows:]) == truth(family)[-rows:]


OTHERS = {
    "cohere2": "a multiplier after the head",
    "iquestloopcoder": "layers run twice, two caches each",
    "ministral3": "queries scaled by their positions",
    "muse_glimmer": "embeddings normalised, a multiplier and a soft cap after the head",
    "smollm3": "windows over keys that all stay",
}


@pytest.mark.parametrize("family", OTHERS)
@layouts
def test_what_is_special_to_a_family_is_its_own_codes_to_know(
    family: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_for(family), "layout", layout)
    for rows, right in ((1, 0.5), (5, 0.7)):
        answers = ids_of(
            family,
            scripted(family, right),
            PROMPTS[-rows:],
            prefill_chunk=7,
            rectangle=layout is Layout.RECTANGLE,
        )
        assert answers == truth(family)[-rows:]
    assert target_for(family)._run_together(rectangle=layout is not Layout.LIST)


# states --------------------------------------------------------------------------------------------------


def fed(target: DenseTarget, rows: RowStates, tokens: list[list[int]], keep: Sequence[int]) -> mx.array:
    """The logits of a round that keeps `keep` of `tokens`."""
    with rows.transaction(len(tokens[0])) as transaction:
        out = target.forward(mx.array(tokens), rows)
        transaction.commit(keep)
    assert out.logits is not None
    return out.logits


def stands_at(target: DenseTarget, rows: RowStates, texts: list[list[int]]) -> bool:
    """Whether the next logits of each row are those of the model on the row's text, read at once."""
    ahead = fed(target, rows, [[9, 8, 7]] * len(rows), [0] * len(rows))
    whole = [target.model(mx.array([[*text, 9, 8, 7]]))[0, -3:] for text in texts]
    return rows.depth == list(map(len, texts)) and all(
        mx.allclose(mine, theirs, rtol=1e-4, atol=1e-4).item()
        for mine, theirs in zip(ahead, whole, strict=True)
    )


@families
@pytest.mark.parametrize("n", [1, 2, 4])
def test_after_any_rollback_the_next_logits_are_those_of_a_fresh_prefill(family: str, n: int) -> None:
    target, draw = target_for(family), random.Random(n)
    rows, texts = target.new_rows(n), [[] for _ in range(n)]
    for _ in range(25):
        width = draw.choice([1, 2, 5, 16, 17, 40])
        tokens = [[draw.randrange(3, VOCAB) for _ in range(width)] for _ in range(n)]
        keep = [draw.choice([0, width, draw.randint(0, width)]) for _ in range(n)]
        fed(target, rows, tokens, keep)
        for text, row, kept in zip(texts, tokens, keep, strict=True):
            text += row[:kept]
        if max(map(len, texts)) > 400:
            break
    assert min(map(len, texts)) > 40
    assert stands_at(target, rows, texts)


@families
def test_rows_that_come_from_elsewhere_go_on_as_they_were(family: str) -> None:
    target, texts = target_for(family), [PROMPTS[0], PROMPTS[4] * 2, PROMPTS[3]]
    apart = [target.new_rows() for _ in texts]
    for rows, text in zip(apart, texts, strict=True):
        fed(target, rows, [text], [len(text)])
    joined = apart[0]
    for rows in apart[1:]:
        joined.join(rows)
    assert stands_at(target, joined, texts)
    joined.select([2, 0])
    assert stands_at(target, joined, [texts[2], texts[0]])


@families
def test_a_capture_goes_on_from_every_depth_that_it_names(family: str) -> None:
    target, text = target_for(family), [(5 * i) % 300 + 6 for i in range(330)]
    rows = target.new_rows()
    fed(target, rows, [text], [len(text)])
    capture = rows.capture(0)
    named = {rows.rewindable(capture, wish) for wish in range(0, 331, 66)}
    assert {0, 330, 264, 132} <= named
    for depth in sorted(named):
        again = target.new_rows()
        again.restore(0, capture, depth)
        assert stands_at(target, again, [text[:depth]])
        fed(target, again, [[4] * 7], [7])
        later = again.capture(0)
        for wish in (depth + 7, depth, depth - 1, 1):
            reached = again.rewindable(later, max(wish, 0))
            twice = target.new_rows()
            twice.restore(0, later, reached)
            assert stands_at(target, twice, [[*text[:depth], *[4] * 7][:reached]])


@pytest.mark.parametrize("rectangle", [False, True])
@families
def test_rows_run_at_once_where_the_models_code_takes_them(family: str, rectangle: bool) -> None:
    """Gemma 2 attends in code of its own, to one row."""
    assert target_for(family)._run_together(rectangle=rectangle) is (family != "gemma2")


# faithfulness --------------------------------------------------------------------------------------------


@families
def test_the_models_own_forward_is_the_authority(family: str) -> None:
    model, target = model_of(family), target_for(family)
    tokens = mx.array([PROMPTS[4]])
    rows, last = target.new_rows(), target.spec.layers - 1
    with rows.transaction(tokens.shape[1]):
        out = target.forward(tokens, rows, taps=(-1, last))
    with rows.transaction(tokens.shape[1]):
        newest = target.forward(tokens, rows, logits=Logits.LAST).logits
    assert out.logits is not None
    assert out.features is not None
    assert newest is not None
    own = model(tokens)
    assert mx.allclose(out.logits, own, rtol=1e-4, atol=1e-4).item()
    assert mx.allclose(newest, own[:, -1:], rtol=1e-4, atol=1e-4).item()
    entering, leaving = mx.split(out.features, 2, axis=-1)
    assert mx.array_equal(target.embed(tokens), entering).item()
    raw, cap = target.unembed(model.model.norm(leaving)), getattr(model, "final_logit_softcapping", None)
    assert mx.allclose(mx.tanh(raw / cap) * cap if cap else raw, out.logits, rtol=1e-4, atol=1e-4).item()
    assert cap is None or mx.abs(raw).max().item() > cap
