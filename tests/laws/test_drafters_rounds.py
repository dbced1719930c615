"""Model drafters inside the loop: greedy ids equal stock mlx-lm's, and good drafts are accepted."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.contracts import Drafter
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import stock_greedy
from tests.tiny import VOCAB, tiny_config, tiny_qwen3
from tests.tiny_dflash2 import save_tiny_dflash2
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_packagings import save_tiny_nemotron, save_tiny_speculators

NEW = 24
PROMPTS = ([5], [7, 11, 13, 17, 19, 23], [30, 31, 32, 33] * 5)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vanilla": (save_tiny_dspark, {}),
    "rnn gemma4": (save_tiny_dspark, {"markov": "rnn", "backbone": "gemma4"}),
    "borrowed": (save_tiny_dspark, {"own_embedding": False, "own_head": False, "taps": (-1, 1)}),
    "reduced": (save_tiny_dspark, {"draft_vocab": 96}),
    "dflash": (save_tiny_dflash, {}),
    "dflash sliding": (save_tiny_dflash, {"sliding": (0, 1), "sliding_window": 6}),
    "dflash 2": (save_tiny_dflash2, {"sliding": (0, 1), "sliding_window": 10, "is_causal": False}),
    "speculators reduced": (save_tiny_speculators, {"draft_vocab": 96, "logits_start": 1}),
    "speculators dflash": (save_tiny_speculators, {"algorithm": "dflash", "sliding": (0,)}),
    "nemotron": (save_tiny_nemotron, {}),
}


@lru_cache
def model() -> Any:
    return tiny_qwen3(seed=1)


@lru_cache
def target() -> DenseTarget:
    return target_of(model(), tiny_config("qwen3"), context=512)


@lru_cache
def truth() -> list[list[int]]:
    return [stock_greedy(model(), prompt, NEW) for prompt in PROMPTS]


def run(
    drafter: Drafter, cap: int, *, chunk: int = 512, sampling: SamplingParams | None = None
) -> tuple[list[list[int]], int]:
    """The answers, and how many drafts were accepted in all."""
    drafter.bind(target())
    engine = Engine(
        target(),
        drafter,
        cap=FixedCaps({source.name: cap for source in drafter.sources}),
        prefill_chunk=chunk,
    )
    requests = [GenerateRequest(tuple(p), NEW, sampling or SamplingParams()) for p in PROMPTS]
    answers: list[list[int]] = [[] for _ in PROMPTS]
    accepted = 0
    for index, event in engine.run(requests):
        if isinstance(event, Committed):
            answers[index] += event.tokens
            accepted += event.report.accepted
    return answers, accepted


def bigrams(folder: Path) -> Path:
    """A DSpark head whose Markov table holds, for each token, the one after it in the true answers."""
    save_tiny_dspark(folder, vocab=VOCAB, markov_rank=VOCAB)
    path = folder / "model.safetensors"
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    follows = mx.zeros((VOCAB, VOCAB))
    for prompt, answer in zip(PROMPTS, truth(), strict=True):
        text = [*prompt, *answer]
        for before, after in pairwise(text):
            follows[after, before] = 1.0
    weights["markov_head.markov_w1.weight"] = mx.eye(VOCAB)
    weights["markov_head.markov_w2.weight"] = follows
    weights["confidence_head.proj.weight"] = mx.zeros((1, 64 + VOCAB))
    weights["lm_head.weight"] = mx.zeros((VOCAB, 64))
    mx.eval(weights)
    path.unlink()
    mx.save_safetensors(str(path), weights)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [0, 1, 4, 16])
def test_greedy_equals_stock(kind: str, cap: int, tmp_path: Path) -> None:
    save, options = KINDS[kind]
    drafter = load_drafter(save(tmp_path, vocab=VOCAB, target_layers=2, **options))
    assert run(drafter, cap, chunk=7)[0] == truth()


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_good_drafts_are_accepted(bits: int, threshold: float, tmp_path: Path) -> None:
    drafter = load_drafter(bigrams(tmp_path), quantize_bits=bits, confidence_threshold=threshold)
    answers, accepted = run(drafter, 7)
    assert answers == truth()
    assert accepted > NEW


def test_lookup_before_a_model_equals_stock(tmp_path: Path) -> None:
    drafter = FirstHit([LookupDrafter(min_n=2, max_n=3), load_drafter(bigrams(tmp_path))])
    answers, accepted = run(drafter, 5)
    assert answers == truth()
    assert accepted > NEW


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_text_with_and_without_drafts(kind: str, tmp_path: Path) -> None:
    save, options = KINDS[kind]
    drafter = load_drafter(save(tmp_path, vocab=VOCAB, target_layers=2, **options))
    sampling = SamplingParams(temperature=1.0, top_k=40, seed=11)
    plain, _ = run(drafter, 0, sampling=sampling)
    assert run(drafter, 5, sampling=sampling)[0] == plain
