"""Training data: what is stored is what the target says, and an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.errors import BadCheckpoint, UsageError
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.targets.load import target_of
from mlx_dspark.train.data import Answer, DiskStore
from mlx_dspark.train.generate import Answerer, Recipe
from mlx_dspark.train.prompts import UserTurns, read_prompts
from tests.tiny import EOS_IDS, tiny_config, tiny_llama, tiny_tokenizer

RECIPE = Recipe(rows=6, answer_tokens=24)
PROMPTS = ["Say this.", "the word and the other", "A", "Two turns of talk", "x y z", "to be", "or not", "end"]


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    target = target_of(tiny_llama(seed=5, stops=True), tiny_config("llama"))
    return Answerer(target, tiny_tokenizer(), EOS_IDS, RECIPE)


def content(store: DiskStore) -> list[tuple[list[int], int]]:
    found = [store.sequence(i) for i in range(len(store))]
    return [(ids.tolist(), prompt) for ids, prompt in found]


def test_greedy_answers_are_the_targets_own(answerer: Answerer, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "data", "tiny")
    answerer.fill(store, PROMPTS, 0)
    engine = Engine(answerer._engine.target)
    greedy = 0
    for ids, prompt in content(store):
        request = GenerateRequest(tuple(ids[:prompt]), RECIPE.answer_tokens, end_ids=EOS_IDS)
        plain = [t for e in engine.stream(request) if isinstance(e, Committed) for t in e.tokens]
        greedy += ids[prompt:] == plain
    assert greedy >= len(store) // 2 > 0


def test_an_interrupted_run_goes_on_and_ends_the_same(answerer: Answerer, tmp_path: Path) -> None:
    whole, parts = DiskStore(tmp_path / "whole", "tiny"), DiskStore(tmp_path / "parts", "tiny")
    answerer.fill(whole, PROMPTS, 7)
    waves = []
    answerer.fill(parts, PROMPTS, 7, deadline=monotonic() + 0.01, progress=waves.append)
    assert len(waves) < 3
    reopened = DiskStore(tmp_path / "parts", "tiny")
    answerer.fill(reopened, PROMPTS, 7)
    assert content(reopened) == content(whole)
    assert content(DiskStore(tmp_path / "parts", "tiny")) == content(whole)
    assert reopened.counts(384).sum() == reopened.answer_tokens


def test_own_prompts_are_whole_user_turns(answerer: Answerer, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "data", "tiny")
    answerer.fill(store, [], 12)
    around = UserTurns(tiny_tokenizer())
    assert len(store)
    for ids, prompt in content(store):
        assert tuple(ids[: len(around.opened(""))]) == around.opened("")
        assert tuple(ids[prompt - len(around.closing) : prompt]) == around.closing


def test_stores_refuse_what_is_not_theirs(tmp_path: Path) -> None:
    DiskStore(tmp_path / "a", "one").append([Answer([1, 2], [3])])
    with pytest.raises(UsageError, match="another target"):
        DiskStore(tmp_path / "a", "two")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        DiskStore(tmp_path / "b", "one")
    shard = next((tmp_path / "a").glob("*.npz"))
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(BadCheckpoint, match="damaged"):
        DiskStore(tmp_path / "a", "one")


def test_prompts_are_read_from_lines_and_paragraphs(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        {"text": "b"},
        {"turns": ["c", "d"]},
        {"messages": [{"role": "user", "content": "e"}]},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_prompts(tmp_path / "p.jsonl") == ["a", "b", "c", lines[3]["messages"]]
    (tmp_path / "p.txt").write_text("one\nstill one\n\n\ntwo\n")
    assert read_prompts(tmp_path / "p.txt") == ["one\nstill one", "two"]


@pytest.mark.parametrize("content", ["", "\n\n", "[1]", '{"other": 1}', '{"prompt"'])
def test_files_without_prompts_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"p\.jsonl"):
        read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(UsageError, match=r"gone\.jsonl"):
        read_prompts(tmp_path / "gone.jsonl")


def test_ids_survive_the_disk_exactly(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "s", "t")
    store.append([Answer([1, 70_000], [2**20, 5]), Answer([3], [])])
    again = DiskStore(tmp_path / "s", "t")
    assert content(again) == [([1, 70_000, 2**20, 5], 2), ([3], 1)]
    assert np.array_equal(np.flatnonzero(again.counts(2**21)), [5, 2**20])
