"""Every kind of family after any history of its states, and some in batches that start full.

Each answer is stock mlx-lm's greedy text, and what is remembered is what a fresh prefill of the text leaves.
Windows are of 16 tokens; prompts end before them, at their edges and past them.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.company import PROMPTS, close, fed, read, same_content
from tests.fakes import ScriptedDrafter, TextOracle, stock_greedy
from tests.tiny import VOCAB
from tests.tiny_families import family_config, tiny_family

LONG, SHORT = 80, 16

KINDS = {
    "qwen3": "keys and values that stay",
    "mixtral": "experts",
    "llama": "windows and full layers",
    "smollm3": "windows, layers without rotation",
    "gemma2": "soft caps, attention of its own",
    "gemma3_text": "windows",
    "gemma3n": "several streams, shared keys",
    "gemma4_text": "shared keys, keys as values, inputs per layer",
    "gpt_oss": "attention sinks, experts",
    "muse_glimmer": "multiplier and soft cap",
    "cohere2": "windows, a multiplier",
    "iquestloopcoder": "layers run twice, two caches each",
    "nanbeige": "layers run twice",
    "deepseek_v3": "latent keys",
    "deepseek_v32": "two caches in a list",
    "llama4": "chunks",
    "afm7": "layers that read the last layer's keys",
    "lfm2": "short convolutions",
    "lfm2_moe": "short convolutions, experts",
    "qwen3_next": "gated delta nets",
    "qwen3_5": "gated delta nets",
    "qwen3_5_moe": "gated delta nets, experts",
    "nemotron_h": "Mamba-2",
    "mamba": "Mamba alone",
    "falcon_h1": "Mamba-2 beside attention in a layer",
    "kimi_linear": "delta attention, latent keys: rows one by one",
    "recurrent_gemma": "a gated recurrence and windows",
    "rwkv7": "a state shared by two parts of a layer",
}
kinds = pytest.mark.parametrize("family", KINDS)


@lru_cache
def model_of(family: str) -> Any:
    return tiny_family(family, seed=1)


@lru_cache
def target_for(family: str) -> DenseTarget:
    return target_of(model_of(family), family_config(family), context=512)


@lru_cache
def text_of(family: str, prompt: int, new: int) -> list[int]:
    return stock_greedy(model_of(family), PROMPTS[prompt], new)


# answers -------------------------------------------------------------------------------------------------


def always_wrong(family: str) -> ScriptedDrafter:
    texts = [[*PROMPTS[i], *text_of(family, i, SHORT if i else LONG)] for i in range(len(PROMPTS))]
    return ScriptedDrafter(TextOracle(texts), 0.0, vocab=VOCAB, ragged=True)


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("family", ["gemma4_text", "falcon_h1"])
def test_batches_of_every_size_equal_their_rows(family: str, rows: int) -> None:
    caps = FixedCaps({"scripted": 5})
    with Scheduler(target_for(family), always_wrong(family), cap=caps, max_rows=rows) as engine:
        asked = [(i % len(PROMPTS), SHORT - i) for i in range(rows)]
        streams = [engine.submit(GenerateRequest(tuple(PROMPTS[i]), new)) for i, new in asked]
        for (prompt, new), stream in zip(asked, streams, strict=True):
            rounds, _ = read(stream)
            assert [token for tokens in rounds for token in tokens] == text_of(
                family, prompt, SHORT if prompt else LONG
            )[:new]


@pytest.mark.parametrize("right", [0.0, 0.7])
def test_a_token_that_no_text_has_does_not_reach_a_batch(right: float) -> None:
    """Rows of other lengths stand beside each other, and of token 0 this model makes no number."""
    model: Any = tiny_family("gemma3n", seed=1)
    table = model.model.language_model.embed_tokens
    table.weight = mx.concatenate([mx.zeros((3, table.weight.shape[1])), table.weight[3:]])
    assert mx.any(mx.isnan(model(mx.array([[5, 0]])))).item()
    target = target_of(model, family_config("gemma3n"), context=512)
    texts = [stock_greedy(model, prompt, SHORT) for prompt in PROMPTS[2:]]
    oracle = TextOracle([[*p, *t, *[9] * 8] for p, t in zip(PROMPTS[2:], texts, strict=True)])
    drafter = WithoutZero(oracle, right, vocab=VOCAB, ragged=True)
    engine, got = Engine(target, drafter, cap=FixedCaps({"scripted": 4}), prefill_chunk=11), [[], [], []]
    for index, event in engine.run([GenerateRequest(tuple(p), SHORT) for p in PROMPTS[2:]]):
        if isinstance(event, Committed):
            got[index] += event.tokens
    assert got == texts


class WithoutZero(ScriptedDrafter):
    """Never drafts the special tokens."""

    def _spoiled(self, token: int) -> int:
        return max(3, super()._spoiled(token))


# states --------------------------------------------------------------------------------------------------


@kinds
def test_after_any_history_states_and_next_logits_are_those_of_a_fresh_prefill(family: str) -> None:
    target, draw = target_for(family), random.Random(family)
    rows, texts = target.new_rows(2), [[], []]
    for _ in range(14):
        width = draw.choice([1, 2, 5, 9])
        feed = [[draw.randrange(3, VOCAB) for _ in range(width)] for _ in texts]
        keep = [draw.choice([0, width, draw.randint(0, width)]) for _ in texts]
        fed(target, rows, feed, keep)
        texts = [[*text, *row[:kept]] for text, row, kept in zip(texts, feed, keep, strict=True)]
        rows, texts = changed(target, rows, texts, draw)
    after = fed(target, rows, [[9, 8]] * len(texts), [0] * len(texts))
    for row, text in enumerate(texts):
        fresh = target.new_rows()
        if text:
            fed(target, fresh, [text], [len(text)])
        assert same_content(rows, row, fresh)
        assert close(after[row], fed(target, fresh, [[9, 8]], [0])[0])


def changed(
    target: DenseTarget, rows: RowStates, texts: list[list[int]], draw: random.Random
) -> tuple[RowStates, list[list[int]]]:
    """The rows after one of: nothing, a newcomer, a member that leaves, one that is replaced or moved."""
    what = draw.choice(["nothing", "join", "leave", "replace", "restore"])
    prompt = PROMPTS[draw.randrange(len(PROMPTS))]
    new = target.new_rows()
    if what in ("join", "replace"):
        fed(target, new, [prompt], [len(prompt)])
    if what == "join" and len(texts) < 8:
        rows.join(new)
        return rows, [*texts, list(prompt)]
    if what == "leave" and len(texts) > 1:
        order = draw.sample(range(len(texts)), len(texts) - 1)
        rows.select(order)
        return rows, [texts[i] for i in order]
    place = draw.randrange(len(texts))
    if what == "replace":
        rows.replace([place], new)
        texts = [*texts[:place], list(prompt), *texts[place + 1 :]]
    if what == "restore":
        capture = rows.capture(place)
        fed(target, rows, [[7, 7, 7]] * len(texts), [3 if i == place else 0 for i in range(len(texts))])
        rows.restore(place, capture)
    return rows, texts


@pytest.mark.parametrize("family", ["recurrent_gemma", "mamba", "rwkv7", "lfm2", "qwen3_5", "nemotron_h"])
def test_a_row_that_kept_nothing_yet_begins_as_if_it_were_new(family: str) -> None:
    """Also beside a row that is further on: an empty cache is not to every recurrence what zeros are."""
    target, text = target_for(family), PROMPTS[0]
    rows = target.new_rows(2)
    fed(target, rows, [[9] * 5, text[:5]], [0, 3])
    fed(target, rows, [text[:4], text[3:7]], [4, 4])
    after = fed(target, rows, [text[4:6], text[7:9]], [0, 0])
    own = target.own_logits(mx.array([text]))[0]
    assert close(after[0], own[4:6])
    assert close(after[1], own[7:9])
