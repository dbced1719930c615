"""Every text model of mlx-lm runs exactly, or is refused with a reason: docs/families.md is right."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest

from mlx_dspark.contracts import Drafter, Logits
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.targets.dense.parts import body_of
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.faithful.probes import Faithfulness, faithfulness
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, TextOracle, stock_greedy
from tests.families_page import REFUSED, RUN
from tests.tiny_families import ONLY, family_config, tiny_family

NEW = 8
PROMPTS = [[(7 * i + 31 * n) % 350 + 5 for i in range(n)] for n in (15, 40)]
NOT_BUILT = {"olmo": "needs a package of its own", "prism_hadamard_qwen35": "is a packing of qwen3_5"}
STATES = {
    "KVState": "all",
    "WindowState": "window",
    "ChunkedState": "chunk",
    "RecurrentState": "recurrent",
}


@lru_cache(maxsize=4)
def model_of(family: str) -> Any:
    return tiny_family(family, seed=1)


@lru_cache(maxsize=4)
def target_for(family: str) -> DenseTarget:
    return target_of(model_of(family), family_config(family), context=512)


def test_every_text_model_of_mlx_lm_is_named() -> None:
    names = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)} - {"olmo"}
    models = {name for name in names if hasattr(import_module(f"mlx_lm.models.{name}"), "Model")}
    assert {*models, "olmo"} == {*RUN, *REFUSED, *NOT_BUILT}
    assert models == {name for name in ONLY if "." not in name}
    assert not RUN.keys() & REFUSED.keys()


def described(family: str, target: DenseTarget, found: Faithfulness) -> tuple[str, ...]:
    """The cells of a family's line: states, rows, drafters and tables."""
    parts = target._parts
    tables = {"embedding": parts.embed, "head": parts.raw_head}
    return (
        ", ".join(word for kind, word in STATES.items() if kind in target.state_kinds),
        "together" if target._run_together(rectangle=False) else "one by one",
        "no" if found.taps else "yes",
        ", ".join(name for name, part in tables.items() if part is not None) or "none",
        "yes" if takes_few_bits(family) else "no",
    )


def takes_few_bits(family: str) -> bool:
    """Whether its keys and values may be quantized where its heads are wide enough."""
    model, config = tiny_family(family, wide=True), family_config(family, wide=True)
    try:
        target_of(model, config, context=512, kv_bits=8)
    except UnsupportedModel as refusal:
        told = refusal
    else:
        return True
    assert told.field == "kv_bits"
    assert "wide" not in told.sentence
    return False


def answers(target: DenseTarget, drafter: Drafter, prompts: Sequence[list[int]]) -> list[list[int]]:
    engine = Engine(target, drafter, cap=FixedCaps({"scripted": 4}), prefill_chunk=11)
    got: list[list[int]] = [[] for _ in prompts]
    for index, event in engine.run([GenerateRequest(tuple(p), NEW) for p in prompts]):
        if isinstance(event, Committed):
            got[index] += event.tokens
    return got


@pytest.mark.parametrize("family", RUN)
def test_what_runs_runs_exactly_and_as_the_page_says(family: str) -> None:
    target = target_for(family)
    found = faithfulness(target, (-1, 0, target.spec.layers - 1))
    assert (found.replay, found.rows) == ("", "")
    assert described(family, target, found) == RUN[family]
    truth = [stock_greedy(model_of(family), prompt, NEW) for prompt in PROMPTS]
    oracle = TextOracle([[*p, *t] for p, t in zip(PROMPTS, truth, strict=True)])
    drafter = ScriptedDrafter(oracle, 0.4, vocab=target.spec.vocab, ragged=True)
    assert answers(target, drafter, PROMPTS) == truth


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused_is_refused_with_a_reason(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(REFUSED[family][0])) as refusal:
        target_for(family)
    assert family in refusal.value.sentence or "this model" in refusal.value.sentence
    assert refusal.value.next_step


# heads ---------------------------------------------------------------------------------------------------


def soft(cap: float) -> Callable[[mx.array], mx.array]:
    return lambda raw: mx.tanh(raw / cap) * cap


AFTER_THE_HEAD: dict[str, Callable[[mx.array], mx.array]] = {
    "gemma2": soft(3.0),
    "gemma4_text": soft(3.0),
    "gear": soft(3.0),
    "recurrent_gemma": soft(3.0),
    "nanochat": soft(15.0),
    "cohere": lambda raw: raw * 0.5,
    "cohere2": lambda raw: raw * 0.5,
    "granite": lambda raw: raw / 2.0,
    "granitemoe": lambda raw: raw / 2.0,
    "granitemoehybrid": lambda raw: raw / 2.0,
    "minicpm": lambda raw: raw / 2.0,
    "minicpm3": lambda raw: raw / 2.0,
    "muse_glimmer": lambda raw: soft(3.0)(raw * 0.19611613513818404),
}


@pytest.mark.parametrize("family", AFTER_THE_HEAD)
def test_unembed_is_the_raw_head_and_what_decides_is_the_whole_one(family: str) -> None:
    """What follows the head is in the logits that verify, on every path to them, and not in `unembed`."""
    target, model, tokens = target_for(family), model_of(family), mx.array([PROMPTS[0]])
    raw, own = target.unembed(body_of(model)(tokens, cache=None)), model(tokens)
    assert mx.allclose(AFTER_THE_HEAD[family](raw), own, rtol=1e-4, atol=1e-4).item()
    assert not mx.allclose(raw, own, rtol=1e-3, atol=1e-3).item()
    places = mx.array([[0, 3, 14]])
    for wanted, expected in ((Logits.ALL, own), (places, own[:, [0, 3, 14]])):
        rows = target.new_rows()
        with rows.transaction(len(PROMPTS[0])):
            logits = target.forward(tokens, rows, logits=wanted).logits
        assert logits is not None
        assert mx.allclose(logits, expected, rtol=1e-4, atol=1e-4).item()
