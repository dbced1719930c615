"""Every kind of family in batches of 1 to 8 whose members join and leave, against an always-wrong drafter.

Each answer is stock mlx-lm's greedy text, and what is remembered is what a fresh prefill of the text leaves.
Windows are of 16 tokens; prompts end before them, at their edges and past them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from mlx_dspark.engine.caps import FixedCaps
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.events import Committed, Finished
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.state.quantized import GROUP
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, TextOracle, stock_greedy
from tests.tiny import VOCAB
from tests.tiny_families import family_config, tiny_family

DEADLINE = 60.0
LONG, SHORT = 80, 16
PROMPTS = [[(7 * i * i + 31 * n) % 350 + 5 for i in range(n)] for n in (10, 15, 16, 17, 40)]

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


def tokens_until(stream: Stream, wanted: int | None) -> list[int]:
    """The tokens of a stream until there are `wanted`, or all of them."""
    got: list[int] = []
    while wanted is None or len(got) < wanted:
        try:
            event = stream.next(DEADLINE)
        except StopIteration:
            return got
        got += event.tokens if isinstance(event, Committed) else []
        if isinstance(event, Finished):
            return got
    return got


@kinds
def test_members_that_join_and_leave_get_stock_text(family: str) -> None:
    """A long text that is always drafted wrongly, beside others that join at any token of it, end or are
    cancelled."""
    draw = random.Random(family)
    limit, caps = draw.randint(2, 8), FixedCaps({"scripted": 4})
    with Scheduler(
        target_for(family), always_wrong(family), cap=caps, max_rows=limit, prefill_chunk=11
    ) as engine:
        long, got = engine.submit(GenerateRequest(tuple(PROMPTS[0]), LONG)), []
        members: list[tuple[int, int, Stream]] = []
        while len(members) < 8:
            got += tokens_until(long, draw.randint(0, 12))
            for _ in range(draw.randint(1, 4)):
                prompt, new = draw.randint(1, len(PROMPTS) - 1), draw.randint(1, SHORT)
                members.append((prompt, new, engine.submit(GenerateRequest(tuple(PROMPTS[prompt]), new))))
            if draw.random() < 0.3:
                draw.choice(members)[2].cancel()
        for prompt, new, stream in members:
            answer, truth = tokens_until(stream, None), text_of(family, prompt, SHORT)
            assert answer == truth[: len(answer)]
            assert len(answer) <= new
        assert got + tokens_until(long, None) == text_of(family, 0, LONG)


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("family", ["gemma4_text", "falcon_h1"])
def test_batches_of_every_size_equal_their_rows(family: str, rows: int) -> None:
    caps = FixedCaps({"scripted": 5})
    with Scheduler(target_for(family), always_wrong(family), cap=caps, max_rows=rows) as engine:
        asked = [(i % len(PROMPTS), SHORT - i) for i in range(rows)]
        streams = [engine.submit(GenerateRequest(tuple(PROMPTS[i]), new)) for i, new in asked]
        for (prompt, new), stream in zip(asked, streams, strict=True):
            assert tokens_until(stream, None) == text_of(family, prompt, SHORT if prompt else LONG)[:new]


@pytest.mark.parametrize("family", ["llama", "nanbeige", "jamba"])
def test_hundreds_of_rejected_rounds_equal_stock(family: str) -> None:
    text = stock_greedy(model_of(family), PROMPTS[1], 250)
    drafter = ScriptedDrafter(TextOracle([[*PROMPTS[1], *text]]), 0.0, vocab=VOCAB)
    engine = Engine(target_for(family), drafter, cap=FixedCaps({"scripted": 3}))
    events = engine.stream(GenerateRequest(tuple(PROMPTS[1]), 250))
    rounds = [event.tokens for event in events if isinstance(event, Committed)]
    assert [token for tokens in rounds for token in tokens] == text
    assert len(rounds) == 250


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


# quantized keys ------------------------------------------------------------------------------------------


@lru_cache
def wide(family: str) -> Any:
    return tiny_family(family, seed=1, head_dim=GROUP)


def quantized_text(family: str, prompt: int, bits: int) -> list[int]:
    """Greedy text of mlx-lm's model over its own caches, those that grow quantized."""
    caches = [
        QuantizedKVCache(GROUP, bits) if type(cache) is KVCache else cache
        for cache in make_prompt_cache(wide(family))
    ]
    tokens, text = PROMPTS[prompt], []
    for _ in range(SHORT):
        newest: Any = mx.argmax(wide(family)(mx.array([tokens]), cache=caches)[0, -1])
        tokens = [newest.item()]
        text += tokens
    return text


@pytest.mark.parametrize(
    ("family", "bits"),
    [("qwen3", 4), ("qwen3_moe", 8), ("seed_oss", 8), ("qwen3_next", 8), ("nemotron_h", 4)],
)
def test_batches_over_quantized_keys_equal_stock_over_its_own(family: str, bits: int) -> None:
    target = target_of(wide(family), family_config(family) | {"head_dim": GROUP}, context=512, kv_bits=bits)
    texts = [quantized_text(family, i, bits) for i in range(len(PROMPTS))]
    oracle = TextOracle([[*p, *t] for p, t in zip(PROMPTS, texts, strict=True)])
    drafter = ScriptedDrafter(oracle, 0.0, vocab=VOCAB, ragged=True)
    with Scheduler(target, drafter, cap=FixedCaps({"scripted": 4}), max_rows=3, prefill_chunk=7) as engine:
        streams = [engine.submit(GenerateRequest(tuple(p), SHORT - i)) for i, p in enumerate(PROMPTS)]
        assert [tokens_until(stream, None) for stream in streams] == [
            text[: SHORT - i] for i, text in enumerate(texts)
        ]


# states --------------------------------------------------------------------------------------------------


def fed(target: DenseTarget, rows: RowStates, tokens: list[list[int]], keep: Sequence[int]) -> mx.array:
    """The logits of a round that keeps `keep` of `tokens`."""
    with rows.transaction(len(tokens[0])) as transaction:
        out = target.forward(mx.array(tokens), rows).logits
        mx.eval(out, rows.arrays())
        transaction.commit(keep)
    assert out is not None
    return out


def close(a: mx.array, b: mx.array) -> bool:
    """float32, sums taken in another order: some units in the last places of sums of this size."""
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=3e-4, atol=3e-4).item())


def same_content(mine: RowStates, row: int, fresh: RowStates) -> bool:
    a, b = mine.capture(row), fresh.capture(0)
    return a.depth == b.depth and all(
        close(*_newest(x, y))
        for left, right in zip(a.layers, b.layers, strict=True)
        for x, y in zip(left.arrays, right.arrays, strict=True)
    )


def _newest(x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
    """Of windows, what both hold: how much more than the window is held is a matter of rounds."""
    if x.ndim == 4 and x.shape[2] != y.shape[2]:
        held = min(x.shape[2], y.shape[2])
        return x[:, :, x.shape[2] - held :], y[:, :, y.shape[2] - held :]
    return x, y


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
