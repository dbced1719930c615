"""Training data: what is stored is what the target says, and an interrupted run goes on where it stopped."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import BinaryIO

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.errors import BadCheckpoint, UsageError
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.kernels.dispatch import install_cpu_weights
from mlx_dspark.targets.load import target_of
from mlx_dspark.train.data import Answer, DiskStore, JoinedStore, PartStore, Source, prompt_key
from mlx_dspark.train.generate import Answerer, Answering, Prompt, Recipe
from mlx_dspark.train.prompts import Opener, UserTurns, read_openers, read_prompts
from tests.tiny import EOS_IDS, tiny_config, tiny_llama, tiny_tokenizer

RECIPE = Recipe(rows=4, together=6, answer_tokens=24)
WORDS = ["Say this.", "the word and the other", "A", "Two turns of talk", "x y z", "to be", "or not", "end"]
PROMPTS = [Prompt(word, Source("words")) for word in WORDS]


@pytest.fixture(scope="module", params=["stock", "kernels"])
def answerer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answerer]:
    """Rows in a rectangle, or apart, as the CPU's kernels want them."""
    before = mx.default_device()
    model, report = tiny_llama(seed=5, stops=True), None
    if request.param == "kernels":
        mx.set_default_device(mx.cpu)
        report = install_cpu_weights(model, choice="blocks", cache_dir=tmp_path_factory.mktemp("races"))
    target = target_of(model, tiny_config("llama"), weights=report)
    yield Answerer(target, tiny_tokenizer(), EOS_IDS, RECIPE)
    mx.set_default_device(before)


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
    answerer.fill(parts, PROMPTS, 7, deadline=monotonic())
    assert len(parts) < len(whole)
    reopened = DiskStore(tmp_path / "parts", "tiny")
    answerer.fill(reopened, PROMPTS, 7)
    assert content(reopened) == content(whole)
    assert content(DiskStore(tmp_path / "parts", "tiny")) == content(whole)
    assert reopened.counts(384).sum() == reopened.answer_tokens


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_what_is_stored_does_not_depend_on_the_rows_that_run_at_once(
    answerer: Answerer, tmp_path: Path, rows: int
) -> None:
    other = Answerer(answerer._engine.target, tiny_tokenizer(), EOS_IDS, replace(RECIPE, rows=rows))
    here, there = DiskStore(tmp_path / "here", "tiny"), DiskStore(tmp_path / "there", "tiny")
    answerer.fill(here, PROMPTS, 7)
    other.fill(there, PROMPTS, 7)
    assert content(there) == content(here)


@pytest.mark.parametrize("stopped_at", [1, 130, 200])
@pytest.mark.parametrize("how", ["asked to", "exception"])
def test_a_run_that_breaks_off_keeps_what_is_finished(
    answerer: Answerer, tmp_path: Path, stopped_at: int, how: str
) -> None:
    """Gone on with, it stores what a run in one piece does; what was stored is not answered again."""
    whole, parts = DiskStore(tmp_path / "whole", "tiny"), DiskStore(tmp_path / "parts", "tiny")
    answerer.fill(whole, PROMPTS, 7)
    asked = iter(range(100_000))

    def stop() -> bool:
        if next(asked) < stopped_at:
            return False
        if how == "exception":
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt) if how == "exception" else nullcontext():
        answerer.fill(parts, PROMPTS, 7, stop=stop)
    reopened = DiskStore(tmp_path / "parts", "tiny")
    assert all(each in content(whole) for each in content(reopened))
    assert bool(len(reopened)) == (stopped_at > 1)
    told: list[Answering] = []
    known = sum(reopened.knows(key) for key in whole._known)
    answerer.fill(reopened, PROMPTS, 7, progress=told.append)
    assert told[-1].known == known
    assert content(reopened) == content(whole)


def test_the_left_prompts_count_down_to_none(answerer: Answerer, tmp_path: Path) -> None:
    told: list[Answering] = []
    store = DiskStore(tmp_path / "data", "tiny")
    answerer.fill(store, PROMPTS, 7, progress=told.append)
    lefts = [t.left for t in told]
    assert lefts == sorted(lefts, reverse=True)
    assert (told[-1].prompts, told[-1].left, told[-1].known) == (15, 0, 0)
    assert (told[-1].sequences, told[-1].answer_tokens) == (len(store), store.answer_tokens)
    assert told[-1].sequences + told[-1].short + told[-1].long == 15


@pytest.mark.parametrize("own", [0, 3])
def test_prompts_are_known_by_what_they_say(answerer: Answerer, tmp_path: Path, own: int) -> None:
    """Other prompts are answered whatever is stored already, the same ones are not, from any file."""
    store = DiskStore(tmp_path / "data", "tiny")
    answerer.fill(store, PROMPTS[:5], own)
    before = content(store)
    told: list[Answering] = []
    again = [Prompt(each.content, Source("others", "2")) for each in PROMPTS[3:]]
    answerer.fill(store, again, own, progress=told.append)
    assert told[-1].known == 2 + own
    whole = DiskStore(tmp_path / "whole", "tiny")
    answerer.fill(whole, PROMPTS, own)
    asked = [{prompt_key(ids[:n]) for ids, n in content(each)} for each in (store, whole)]
    assert asked[0] == asked[1]
    assert all(each in content(store) for each in before)
    assert DiskStore(tmp_path / "data", "tiny").sources() == store.sources()
    assert {"words", "others"} <= set(store.sources())
    assert sum(store.sources().values()) == len(store)
    told.clear()
    answerer.fill(store, PROMPTS, own, progress=told.append)
    assert told == []


def test_a_shard_without_keys_is_known_by_its_prompts(answerer: Answerer, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "data", "tiny")
    answerer.fill(store, PROMPTS[:4], 0)
    before = content(store)
    for shard in store.folder.glob("*.npz"):
        with np.load(shard) as arrays:
            kept = {name: arrays[name] for name in ("ids", "sizes")}
        np.savez_compressed(shard, **kept)
    (store.folder / "manifest.json").write_text('{"target": "tiny"}')
    old = DiskStore(tmp_path / "data", "tiny")
    assert content(old) == before
    assert all(old.knows(prompt_key(ids[:n])) for ids, n in before)
    assert list(old.sources()) == ["sources that are not recorded"]


def test_held_out_prompts_are_left_out_of_a_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "s", "t")
    store.append(ANSWERS)
    part = PartStore(store, {prompt_key([6]), prompt_key([2])})
    found = [part.sequence(index) for index in range(len(part))]
    assert sorted(ids[:prompt].tolist() for ids, prompt in found) == [[1, 2, 3], [10, 11]]
    assert part.lengths().tolist() == [[len(ids), prompt] for ids, prompt in found]
    assert store.sources({prompt_key([6]), prompt_key([2])}).total() == 2
    counts = np.zeros(12, dtype=np.int64)
    for ids, prompt in found:
        counts += np.bincount(ids[prompt:], minlength=12)
    assert np.array_equal(part.counts(12), counts)


def test_own_prompts_are_whole_user_turns(answerer: Answerer, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "data", "tiny")
    answerer.fill(store, [], 12)
    around = UserTurns(tiny_tokenizer())
    assert len(store)
    for ids, prompt in content(store):
        opening, closing = around.opened(Opener("")), around.closing(Opener(""))
        assert tuple(ids[: len(opening)]) == opening
        assert tuple(ids[prompt - len(closing) : prompt]) == closing


OPENERS = (Opener("Say", " now!"), Opener("", "\nIn one word."), Opener("What is"))


def test_a_set_ending_stands_before_the_assistants_header(answerer: Answerer, tmp_path: Path) -> None:
    """Every stored prompt is a whole turn of one of the openers, its ending included."""
    tokenizer, store = tiny_tokenizer(), DiskStore(tmp_path / "data", "tiny")
    recipe = replace(RECIPE, openers=OPENERS)
    Answerer(answerer._engine.target, tokenizer, EOS_IDS, recipe).fill(store, [], 18)
    blank = UserTurns(tokenizer)
    before = str(tokenizer.decode(blank.opened(Opener(""))))
    after = str(tokenizer.decode(blank.closing(Opener(""))))
    assert "assistant" in after
    found = set()
    for ids, prompt in content(store):
        text = str(tokenizer.decode(ids[:prompt]))
        fitting = {
            opener
            for opener in OPENERS
            if text.startswith(before + opener.begin) and text.endswith(opener.end + after)
        }
        assert fitting
        if len(fitting) == 1:
            found |= fitting
    assert any(opener.end for opener in found)


def test_openers_are_read_from_lines_of_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "o.txt").write_text("Write a\n\nHow do I\n")
    assert read_openers(tmp_path / "o.txt") == [Opener("Write a"), Opener("How do I")]
    lines = [{"begin": "Solve"}, {"begin": "", "end": " Be brief."}]
    (tmp_path / "o.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    assert read_openers(tmp_path / "o.jsonl") == [Opener("Solve"), Opener("", " Be brief.")]


@pytest.mark.parametrize("bad", ["[1]", '{"end": "."}', '{"begin"', "Write a"])
def test_a_bad_opener_names_its_file_and_line(tmp_path: Path, bad: str) -> None:
    (tmp_path / "o.jsonl").write_text(f'{{"begin": "Say"}}\n\n{bad}\n')
    with pytest.raises(UsageError, match=r"o\.jsonl line 3") as refusal:
        read_openers(tmp_path / "o.jsonl")
    assert refusal.value.field == "self_openers"
    assert refusal.value.next_step


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "gone.txt"])
def test_files_without_openers_are_refused(tmp_path: Path, name: str) -> None:
    if "empty" in name:
        (tmp_path / name).write_text("\n \n")
    with pytest.raises(UsageError, match=name) as refusal:
        read_openers(tmp_path / name)
    assert refusal.value.field == "self_openers"


ANSWERS = [Answer([1, 2, 3], [4, 5]), Answer([6], [7, 7, 8, 9]), Answer([10, 11], [4]), Answer([2], [])]


@pytest.mark.parametrize("parts", [(4, 0), (1, 3), (0, 2, 2), (1, 1, 1, 1)])
def test_several_stores_are_one_with_the_same_answers(tmp_path: Path, parts: tuple[int, ...]) -> None:
    whole, left, stores = DiskStore(tmp_path / "whole", "t"), list(ANSWERS), []
    whole.append(ANSWERS)
    for number, size in enumerate(parts):
        stores.append(DiskStore(tmp_path / str(number), "t"))
        if size:
            stores[-1].append(left[:size])
        del left[:size]
    joined = JoinedStore(stores)
    assert len(joined) == len(whole) == 4
    for index in range(4):
        mine, theirs = joined.sequence(index), whole.sequence(index)
        assert (mine[0].tolist(), mine[1]) == (theirs[0].tolist(), theirs[1])
    assert np.array_equal(joined.lengths(), whole.lengths())
    assert np.array_equal(joined.counts(12), whole.counts(12))
    with pytest.raises(IndexError):
        joined.sequence(4)


def test_a_full_disk_keeps_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard that finds no room is not there at all; those before it stay."""
    store = DiskStore(tmp_path / "s", "t")
    store.append(ANSWERS[:2])

    def no_room(file: BinaryIO, **arrays: np.ndarray) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", no_room)
        with pytest.raises(OSError, match="No space"):
            store.append(ANSWERS[2:])
    assert sorted(path.name for path in store.folder.iterdir()) == ["answers-00000.npz", "manifest.json"]
    assert content(DiskStore(tmp_path / "s", "t")) == content(store)
    store.append(ANSWERS[2:])
    assert len(DiskStore(tmp_path / "s", "t")) == 4


def test_stores_refuse_what_is_not_theirs(tmp_path: Path) -> None:
    DiskStore(tmp_path / "a", "one").append([Answer([1, 2], [3])])
    with pytest.raises(UsageError, match="another target"):
        DiskStore(tmp_path / "a", "two")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
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


NO_PROMPTS = {
    '{"messages": [{"role": "user"}]}': "messages[0] has no content",
    '{"messages": [{"content": "x"}]}': "messages[0] has no role",
    '{"messages": [{"role": "user", "content": [1]}]}': "messages[0].content is [1], and not text",
    '{"messages": [5]}': "messages[0] is 5, and not a message",
    '{"messages": "hi"}': "messages is 'hi', and not a list of messages",
    '{"messages": []}': "messages hold no text",
    '{"turns": []}': "turns is [], and not a list of texts",
    '{"turns": "abc"}': "turns is 'abc', and not a list of texts",
    '{"turns": [1]}': "turns[0] is 1, and not text",
    '{"prompt": 5}': "prompt is 5, and not text",
    '{"prompt": null}': "prompt is None, and not text",
    '{"prompt": ["a"]}': "prompt is ['a'], and not text",
    '{"prompt": " "}': "prompt is empty",
    '{"text": 5}': "text is 5, and not text",
}


@pytest.mark.parametrize("line", NO_PROMPTS)
def test_a_record_that_is_no_prompt_is_refused_by_its_place(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(UsageError) as refused:
        read_prompts(tmp_path / "p.jsonl")
    assert refused.value.sentence.endswith(f"p.jsonl line 2: {NO_PROMPTS[line]}.")
    assert refused.value.next_step


def test_ids_survive_the_disk_exactly(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "s", "t")
    store.append([Answer([1, 70_000], [2**20, 5]), Answer([3], [])])
    again = DiskStore(tmp_path / "s", "t")
    assert sorted(content(again)) == [([1, 70_000, 2**20, 5], 2), ([3], 1)]
    assert np.array_equal(np.flatnonzero(again.counts(2**21)), [5, 2**20])
