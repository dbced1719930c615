"""Models with recurrent layers: whatever drafts, the ids and the states are those of plain decoding.

Prompts around a window of 16, drafts of several quality, rows of different keep counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_dspark.contracts import Logits
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.kernels.dispatch import install_cpu_weights
from mlx_dspark.state.layout import Layout
from mlx_dspark.state.recurrent import RecurrentState
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.gated_delta import rule
from mlx_dspark.targets.load import target_of
from mlx_dspark.targets.mixers import MIXERS
from tests.fakes import ScriptedDrafter, TextOracle, stock_greedy
from tests.tiny import VOCAB
from tests.tiny_hybrids import HYBRIDS, hybrid_config, tiny_hybrid

NEW = 40
PROMPTS = [[(7 * i * i + 3 * n) % 300 + 20 for i in range(n)] for n in (10, 15, 16, 17, 40)]

families = pytest.mark.parametrize("family", HYBRIDS)
qualities = pytest.mark.parametrize("right", [1.0, 0.7, 0.0], ids=["always-right", "70%", "always-wrong"])


@lru_cache
def model_of(family: str) -> Any:
    return tiny_hybrid(family, seed=3)


@lru_cache
def target_for(family: str) -> Any:
    return target_of(model_of(family), hybrid_config(family), context=512)


@lru_cache
def truth(family: str, index: int, new: int = NEW) -> list[int]:
    return stock_greedy(model_of(family), PROMPTS[index], new)


def scripted(family: str, right: float, new: int = NEW, **options: Any) -> ScriptedDrafter:
    texts = [[*prompt, *truth(family, i, new)] for i, prompt in enumerate(PROMPTS)]
    return ScriptedDrafter(TextOracle(texts), right, vocab=VOCAB, **options)


def answers_of(engine: Engine, prompts: Sequence[int], new: Sequence[int] | int = NEW) -> list[list[int]]:
    wanted = [new] * len(prompts) if isinstance(new, int) else new
    requests = [GenerateRequest(tuple(PROMPTS[i]), n) for i, n in zip(prompts, wanted, strict=True)]
    answers: list[list[int]] = [[] for _ in requests]
    for index, event in engine.run(requests):
        if isinstance(event, Committed):
            answers[index] += event.tokens
    return answers


@families
@qualities
@pytest.mark.parametrize("cap", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_any_draft_at_any_cap_equals_stock(family: str, right: float, cap: int, rows: int) -> None:
    drafter = scripted(family, right, seed=cap, ragged=rows > 1)
    for first in range(0, 5, rows):
        prompts = [(first + i) % 5 for i in range(rows)]
        engine = Engine(target_for(family), drafter, cap=FixedCaps({"scripted": cap}))
        assert answers_of(engine, prompts) == [truth(family, i) for i in prompts]


@families
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", Layout)
def test_plain_rows_of_different_prompts_and_lengths_equal_stock(
    family: str, rows: int, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_for(family), "layout", layout)
    prompts, lengths = [4, 0, 3, 1][:rows], [NEW, 9, 17, 30][:rows]
    engine = Engine(target_for(family), prefill_chunk=7, rectangle=layout is Layout.RECTANGLE)
    expected = [truth(family, i)[:n] for i, n in zip(prompts, lengths, strict=True)]
    assert answers_of(engine, prompts, lengths) == expected


@families
@qualities
def test_a_rectangle_that_is_refilled_equals_stock(family: str, right: float) -> None:
    prompts, lengths = [i % 5 for i in range(9)], [3, NEW, 17, 9, 1, 30, 12, 25, 2]
    drafter = scripted(family, right, ragged=True)
    engine = Engine(target_for(family), drafter, cap=FixedCaps({"scripted": 5}), rectangle=True)
    requests = [GenerateRequest(tuple(PROMPTS[i]), n) for i, n in zip(prompts, lengths, strict=True)]
    answers: list[list[int]] = [[] for _ in requests]
    for index, event in engine.run(requests, live_rows=4):
        if isinstance(event, Committed):
            answers[index] += event.tokens
    assert answers == [truth(family, i)[:n] for i, n in zip(prompts, lengths, strict=True)]


@families
@pytest.mark.parametrize("rows", [1, 3])
def test_lookup_equals_stock(family: str, rows: int) -> None:
    drafter = LookupDrafter(min_n=1, max_n=3)
    target = target_for(family)
    drafter.bind(target)
    engine = Engine(target, drafter, cap=cap_policy(3, drafter.sources))
    prompts = [4, 2, 0][:rows]
    assert answers_of(engine, prompts) == [truth(family, i) for i in prompts]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("rows", [1, 2])
def test_hundreds_of_rounds_of_an_always_wrong_drafter_equal_stock(family: str, rows: int) -> None:
    prompts = [3, 1][:rows]
    drafter = scripted(family, 0.0, ragged=rows > 1)
    engine = Engine(target_for(family), drafter, cap=FixedCaps({"scripted": 4}))
    assert answers_of(engine, prompts, 300) == [truth(family, i, 300) for i in prompts]


def fed(target: Any, rows: RowStates, tokens: Sequence[Sequence[int]], keep: Sequence[int]) -> mx.array:
    """The logits of one round."""
    with rows.transaction(len(tokens[0])) as transaction:
        out = target.forward(mx.array([list(row) for row in tokens]), rows, logits=Logits.ALL).logits
        mx.eval(out, rows.arrays())
        transaction.commit(keep)
    return out


def close(a: mx.array, b: mx.array) -> bool:
    """float32, sums taken in another order: a few units in the last places of sums of this size."""
    return bool(mx.allclose(a, b, rtol=2e-4, atol=2e-4).item())


def same_row(a: RowStates, row: int, b: RowStates) -> bool:
    mine, theirs = a.capture(row), b.capture(0)
    return mine.depth == theirs.depth and all(
        close(x, y)
        for left, right in zip(mine.layers, theirs.layers, strict=True)
        for x, y in zip(left.arrays, right.arrays, strict=True)
    )


@families
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("held", [0, rule.HELD])
def test_states_and_next_logits_after_rejections_equal_a_fresh_prefill(
    family: str, rows: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "HELD", held)
    target = target_for(family)
    texts = [[*PROMPTS[4], *truth(family, 4)], *([*PROMPTS[i], *truth(family, i)] for i in range(3))][:rows]
    states, depth = target.new_rows(rows), [0] * rows
    for turn in range(14):
        width = (10, 5, 1, 3)[turn % 4]
        keep = [(turn * (r + 2) + r) % (width + 1) for r in range(rows)]
        feed = [
            [*text[d : d + k], *((t * 13 + turn) % 300 + 20 for t in range(width - k))]
            for text, d, k in zip(texts, depth, keep, strict=True)
        ]
        fed(target, states, feed, keep)
        depth = [d + k for d, k in zip(depth, keep, strict=True)]
    assert states.depth == depth
    after = fed(target, states, [[text[d]] for text, d in zip(texts, depth, strict=True)], [1] * rows)
    for row, (text, d) in enumerate(zip(texts, depth, strict=True)):
        fresh = target.new_rows(1)
        whole = fed(target, fresh, [text[: d + 1]], [d + 1])
        assert close(whole[0, -1], after[row, -1])
        assert same_row(states, row, fresh)


@families
@pytest.mark.parametrize("held", [0, rule.HELD])
def test_a_replay_equals_stepping(family: str, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "HELD", held)
    target, text = target_for(family), [*PROMPTS[4], *truth(family, 4)]
    for kept in range(1, 7):
        replayed, stepped = target.new_rows(1), target.new_rows(1)
        fed(target, replayed, [text[:16]], [16])
        fed(target, stepped, [text[:16]], [16])
        fed(target, replayed, [[*text[16 : 16 + kept], *[25] * (8 - kept)]], [kept])
        for token in text[16 : 16 + kept]:
            fed(target, stepped, [[token]], [1])
        assert same_row(replayed, 0, stepped)


@families
@pytest.mark.parametrize("width", [1, 3, 40])
def test_taped_mixers_compute_what_the_models_own_do(family: str, width: int) -> None:
    """On the same inputs bit for bit, step after step, with the model's own caches beside ours."""
    model, target = model_of(family), target_for(family)
    text = [*PROMPTS[4], *truth(family, 4)]
    stock, states = make_prompt_cache(model), target.new_rows(1)
    for begin in range(0, 80 - width, max(width, 4)):
        tokens = text[begin : begin + width]
        assert mx.array_equal(
            fed(target, states, [tokens], [width]), model(mx.array([tokens]), cache=stock)
        ).item()
    ours = [layer for layer in states.layers if isinstance(layer, RecurrentState)]
    theirs = [cache.cache for cache in stock if hasattr(cache, "cache")]
    assert len(ours) == len(theirs) > 0
    for state, arrays in zip(ours, theirs, strict=True):
        assert all(mx.array_equal(a, b).item() for a, b in zip(state.arrays(), arrays, strict=True))


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_taped_mixers_keep_the_types_of_the_models_own(family: str, dtype: mx.Dtype) -> None:
    model = tiny_hybrid(family)
    model.set_dtype(dtype)
    target = target_of(model, hybrid_config(family), context=512)
    stock, states = make_prompt_cache(model), target.new_rows(1)
    for begin, width in ((0, 7), (7, 1), (8, 5), (13, 1), (14, 20)):
        tokens = PROMPTS[4][begin : begin + width]
        ours = fed(target, states, [tokens], [width])
        assert mx.array_equal(ours, model(mx.array([tokens]), cache=stock)).item()
    recurrent = [layer for layer in states.layers if isinstance(layer, RecurrentState)]
    theirs = [array.dtype for cache in stock if hasattr(cache, "cache") for array in cache.cache]
    assert [array.dtype for layer in recurrent for array in layer.arrays()] == theirs


@families
def test_a_capture_is_restored_at_its_own_depth_and_at_none_between(family: str) -> None:
    target, text = target_for(family), [*PROMPTS[4], *truth(family, 4)]
    states = target.new_rows(2)
    fed(target, states, [text[:12], text[5:17]], [12, 9])
    capture = states.capture(1)
    assert [states.rewindable(capture, to) for to in (0, 5, 8, 9, 30)] == [0, 0, 0, 9, 9]
    logits = fed(target, states, [[30] * 4, text[14:18]], [2, 4])[1]
    restored = target.new_rows(1)
    restored.restore(0, capture)
    assert restored.depth == [9]
    assert close(fed(target, restored, [text[14:18]], [4])[0], logits)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "nemotron_h"])
def test_a_target_may_be_made_of_the_same_model_twice(family: str) -> None:
    again = target_of(model_of(family), hybrid_config(family), context=512)
    assert answers_of(Engine(again), [0, 3]) == [truth(family, 0), truth(family, 3)]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "qwen3_5_moe", "nemotron_h"])
def test_weights_held_for_the_cpu_change_no_token(family: str, tmp_path: Path) -> None:
    model = tiny_hybrid(family, seed=3)
    report = install_cpu_weights(model, choice="dense", cache_dir=tmp_path)
    target = target_of(model, hybrid_config(family), context=512, weights=report)
    assert not target.spec.lazy
    drafter = scripted(family, 0.7, ragged=True)
    engine = Engine(target, drafter, cap=FixedCaps({"scripted": 4}))
    assert answers_of(engine, [0, 3, 1]) == [truth(family, i) for i in (0, 3, 1)]


def test_recurrent_layers_that_leave_no_tape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MIXERS, "lfm2.ShortConv")
    with pytest.raises(UnsupportedModel, match="recurrent layers"):
        target_of(tiny_hybrid("lfm2"), hybrid_config("lfm2"))


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "qwen3_5", "nemotron_h"])
def test_mixers_that_compute_something_else_are_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hybrid(family)
    name = next(name for name in MIXERS if name.startswith(f"{family}."))
    mixer = MIXERS[name]

    def first_forgotten(module: Any, x: mx.array, state: RecurrentState) -> mx.array:
        return mixer(module, mx.concatenate([0 * x[:, :1], x[:, 1:]], axis=1), state)

    monkeypatch.setitem(MIXERS, name, first_forgotten)
    with pytest.raises(UnsupportedModel, match="something else"):
        target_of(model, hybrid_config(family))
