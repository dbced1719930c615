"""Laws of the draft model: it drafts what it would write itself, whatever became of earlier drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.contracts import Ask, Forward, Observation, Proposal, Target
from mlx_dspark.drafters.draft_model import rows as held
from mlx_dspark.drafters.draft_model.drafter import NAME, DraftModelDrafter
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed, Finished
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.state.layout import Layout
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import TableTarget, stock_greedy
from tests.laws.test_engine_sampling import BATCH, FLOOR, LENGTH, PROMPT, ROWS, SETTINGS, TABLE, texts_of
from tests.reference_sampler import fit_p_value, reference_text
from tests.tiny import VOCAB
from tests.tiny_families import family_config, tiny_family

NEW = 16
PROMPTS = ([5], [7, 11, 13, 17, 19, 23], [30, 31, 32, 33] * 5)
TARGETS = ("qwen3", "gemma3_text", "qwen3_5")
DRAFTS = ("llama", "gemma3_text", "qwen3_5", "mamba2", "lfm2", "llama4")
"""All tokens, windows, recurrent layers of three kinds, chunks."""
GREEDY = SamplingParams()


@lru_cache
def model(family: str, seed: int = 1) -> Any:
    return tiny_family(family, seed=seed)


@lru_cache
def target(family: str, seed: int = 1, layout: Layout | None = None) -> DenseTarget:
    return target_of(model(family, seed), family_config(family), context=512, layout=layout)


@lru_cache
def truth(family: str) -> list[list[int]]:
    return [stock_greedy(model(family), prompt, NEW) for prompt in PROMPTS]


def drafter_for(draft: Target, of: Target, most: int = 5) -> DraftModelDrafter:
    drafter = DraftModelDrafter(draft, num_draft_tokens=most)
    drafter.bind(of)
    return drafter


class Run:
    """The answers to PROMPTS, and how many drafts were accepted of all."""

    def __init__(
        self, of: Target, drafter: Any, cap: int, sampling: SamplingParams = GREEDY, *, together: bool = True
    ) -> None:
        self.answers: list[list[int]] = [[] for _ in PROMPTS]
        self.accepted = self.drafted = 0
        caps = FixedCaps({source.name: cap for source in drafter.sources})
        requests = [GenerateRequest(tuple(prompt), NEW, sampling) for prompt in PROMPTS]
        everyone = range(len(PROMPTS))
        for places in [list(everyone)] if together else [[place] for place in everyone]:
            engine = Engine(of, drafter, cap=caps, prefill_chunk=7)
            for row, event in engine.run([requests[place] for place in places]):
                if isinstance(event, Committed):
                    self.answers[places[row]] += event.tokens
                    self.accepted += event.report.accepted
                    self.drafted += event.report.drafted


def ask(anchors: Sequence[int], depth: Sequence[int], caps: Sequence[int], seed: int | None = None) -> Ask:
    sampling = [GREEDY if seed is None else SamplingParams(temperature=1.0, seed=seed)] * len(anchors)
    return Ask(anchors, caps, depth, sampling, RowNoise.of_seeds([seed] * len(anchors)))


def drafts_of(proposal: Proposal) -> list[list[int]]:
    tokens: Any = proposal.tokens.tolist()
    return [row[:length] for row, length in zip(tokens, proposal.lengths, strict=True)]


@pytest.mark.parametrize(
    ("of", "family", "together"),
    [
        *((of, family, True) for of, family in zip(TARGETS * 2, DRAFTS, strict=True)),
        *((of, family, False) for of, family in zip(TARGETS, DRAFTS[2:5], strict=True)),
    ],
)
def test_greedy_equals_stock(of: str, family: str, together: bool) -> None:
    drafter = drafter_for(target(family, 2), target(of))
    assert Run(target(of), drafter, 4, together=together).answers == truth(of)


@pytest.mark.parametrize("of", TARGETS)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, top_k=40, seed=3)])
def test_a_model_accepts_its_own_drafts(of: str, sampling: SamplingParams) -> None:
    drafter = drafter_for(target(of), target(of))
    run, plain = Run(target(of), drafter, 4, sampling), Run(target(of), drafter, 0, sampling)
    assert run.answers == plain.answers
    assert run.drafted == run.accepted > 2 * NEW


def test_lookup_may_go_first() -> None:
    of = target("qwen3")
    both = FirstHit([LookupDrafter(min_n=1, max_n=2), DraftModelDrafter(of, num_draft_tokens=5)])
    both.bind(of)
    run = Run(of, both, 4)
    assert run.answers == truth("qwen3")
    assert run.accepted > NEW


class Story:
    """Rows that draft or not, whose drafts are kept in part, and that come and go."""

    def __init__(self, family: str, layout: Layout | None, seed: str) -> None:
        self._model = model(family, 2)
        self._drafter = drafter_for(target(family, 2, layout), target("qwen3"))
        self._draw = random.Random(seed)
        self._texts: list[list[int]] = []
        self._rows = self._drafter.new_rows(0)
        self.drafted = 0

    def come(self, n: int) -> None:
        new = self._drafter.new_rows(1)
        text = [self._token() for _ in range(n)]
        self._see(new, [text[:-1]])
        if len(self._rows):
            self._rows.join(new)
        else:
            self._rows = new
        self._texts.append(text)

    def leave(self, place: int) -> None:
        keep = [other for other in range(len(self._texts)) if other != place]
        self._texts.pop(place)
        self._rows.select(keep)

    def turn(self, *, asked: int = 1) -> None:
        """A round in which some rows draft up to a cap of their own, and keep some of it."""
        caps = [self._draw.choice((0, 2, 4)) for _ in self._texts]
        asking = ask([text[-1] for text in self._texts], [len(text) - 1 for text in self._texts], caps)
        proposals = [self._drafter.propose(self._rows, asking) for _ in range(asked)]
        own = [stock_greedy(self._model, text, cap) if cap else [] for text, cap in self._both(caps)]
        assert all(drafts_of(proposal) == own for proposal in proposals)
        self.drafted += sum(caps)
        seen = []
        for text, drafts in zip(self._texts, own, strict=True):
            kept = drafts[: self._draw.randint(0, len(drafts))]
            seen.append([text[-1], *kept])
            text += [*kept, self._token()]
        self._see(self._rows, seen)
        assert self._rows.depth == [len(text) - 1 for text in self._texts]

    def _both(self, caps: list[int]) -> zip[tuple[list[int], int]]:
        return zip(self._texts, caps, strict=True)

    def _see(self, rows: Any, tokens: list[list[int]]) -> None:
        none = [0] * len(tokens)
        self._drafter.observe(rows, Observation(tokens, None, none, none))

    def _token(self) -> int:
        return self._draw.randrange(5, VOCAB)


@pytest.mark.parametrize("family", DRAFTS)
@pytest.mark.parametrize("layout", [Layout.LIST, Layout.COMPANY])
def test_it_drafts_what_it_would_write(family: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "READ_AT", 24)
    monkeypatch.setattr(held, "CHUNK", 10)
    story = Story(family, layout, f"{family} {layout}")
    for length in (1, 30, 9):
        story.come(length)
        story.turn()
        story.turn(asked=2)
    story.leave(1)
    story.turn()
    story.come(20)
    story.turn()
    story.turn()
    assert story.drafted >= 10


def test_an_anchor_that_was_not_committed_after_all_is_forgotten() -> None:
    drafter, text = drafter_for(target("qwen3_5", 2), target("qwen3")), [9, 8, 7, 30]
    rows = drafter.new_rows()
    drafter.observe(rows, Observation([text[:-1]], None, [0], [0]))
    for anchor in (40, 30):
        drafts = drafts_of(drafter.propose(rows, ask([anchor], [3], [4])))
        assert drafts == [stock_greedy(model("qwen3_5", 2), [*text[:-1], anchor], 4)]
    drafter.observe(rows, Observation([[50, 51]], None, [0], [0]))
    drafts = drafts_of(drafter.propose(rows, ask([60], [5], [4])))
    assert drafts == [stock_greedy(model("qwen3_5", 2), [*text[:-1], 50, 51, 60], 4)]


class Counted:
    """A target that counts its forwards and the tokens of each."""

    def __init__(self, of: DenseTarget) -> None:
        self._of, self.spec, self.new_rows = of, of.spec, of.new_rows
        self.widths: list[int] = []

    def forward(self, tokens: mx.array, *args: Any, **options: Any) -> Forward:
        self.widths.append(tokens.shape[1])
        return self._of.forward(tokens, *args, **options)


def test_a_parked_row_reads_seldom_and_catches_up() -> None:
    counted: Any = Counted(target("llama", 2))
    drafter = drafter_for(counted, target("qwen3"))
    rows, text = drafter.new_rows(), [(7 * i) % 350 + 5 for i in range(held.READ_AT + 40)]
    for token in text[:-1]:
        drafter.propose(rows, ask([token], rows.depth, [0]))
        drafter.observe(rows, Observation([[token]], None, [0], [0]))
    assert counted.widths == [held.READ_AT]
    drafts = drafts_of(drafter.propose(rows, ask(text[-1:], rows.depth, [3])))
    assert counted.widths == [held.READ_AT, 40, 1, 1]
    assert drafts == [stock_greedy(model("llama", 2), text, 3)]
    drafter.observe(rows, Observation([[text[-1], *drafts[0][:2]]], None, [3], [2]))
    drafter.propose(rows, ask([9], rows.depth, [1]))
    assert counted.widths[4:] == [1], "accepted drafts are not read again"


@pytest.mark.parametrize("cancelled", [False, True])
def test_requests_at_once(cancelled: bool) -> None:
    of = target("qwen3")
    drafter = drafter_for(target("qwen3_5", 2), of)
    with Scheduler(of, drafter, cap=FixedCaps({NAME: 3}), max_rows=3, prefill_chunk=7) as engine:
        long = engine.submit(GenerateRequest((3, 4), 400))
        while not isinstance(long.next(60), Committed):
            pass
        streams = [engine.submit(GenerateRequest(tuple(prompt), NEW)) for prompt in PROMPTS]
        if cancelled:
            streams[1].cancel()
        for place, stream in enumerate(streams):
            answer: list[int] = []
            while not isinstance(event := stream.next(60), Finished):
                answer += event.tokens if isinstance(event, Committed) else ()
            if not (cancelled and place == 1):
                assert answer == truth("qwen3")[place]
        long.cancel()


# vocabularies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [VOCAB - 84, VOCAB, VOCAB + 128])
@pytest.mark.parametrize("seed", [None, 5])
def test_q_is_over_the_targets_vocabulary(vocab: int, seed: int | None) -> None:
    small = tiny_family("llama", seed=4, vocab_size=vocab)
    config = family_config("llama") | {"vocab_size": vocab}
    drafter = drafter_for(target_of(small, config, context=512), target("qwen3"))
    text = [9, VOCAB - 1, 20, 12]
    rows = drafter.new_rows()
    drafter.observe(rows, Observation([text[:-1]], None, [0], [0]))
    proposal = drafter.propose(rows, ask(text[-1:], [3], [5], seed))
    for slot in range(5):
        q = proposal.q.at(mx.array([slot]))
        assert q.shape == (1, VOCAB)
        assert q.sum().item() == pytest.approx(1.0, abs=1e-5)
        assert mx.all(q[0, proposal.tokens[0, slot]] > 0).item()
        assert not mx.any(q[0, vocab:]).item()
    if seed is None:
        known = [token if token < vocab else 0 for token in text]
        logits, own = small(mx.array([known]))[0, -1, :VOCAB], drafts_of(proposal)[0][0]
        assert own == mx.argmax(logits).item()


def test_nothing_is_drafted_past_the_models_context() -> None:
    short = target_of(model("llama", 2), family_config("llama"), context=12)
    run = Run(target("qwen3"), drafter_for(short, target("qwen3")), 4)
    assert run.answers == truth("qwen3")
    rows = (drafter := drafter_for(short, target("qwen3"))).new_rows()
    drafter.observe(rows, Observation([[5] * 10], None, [0], [0]))
    assert drafter.propose(rows, ask([5], [10], [4])).lengths == (2,)
    assert not drafter.blind(rows, [5], {drafter.name})
    drafter.observe(rows, Observation([[5, 5]], None, [0], [0]))
    assert drafter.propose(rows, ask([5], [12], [4])).lengths == (0,)
    assert drafter.blind(rows, [5], {drafter.name})


@pytest.mark.parametrize(
    ("setting", "vocab", "seeded"),
    [("everything", 6, False), ("plain temperature", 11, True)],
)
def test_sampled_text_has_the_plain_samplers_distribution(
    setting: str, vocab: int, seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = np.random.default_rng(5).normal(size=(vocab, vocab)) * 1.5
    of: Any = TableTarget(mx.array(TABLE, dtype=mx.float32))
    drafter = drafter_for(TableTarget(mx.array(table, dtype=mx.float32)), of, 2)
    texts = texts_of(drafter, SETTINGS[setting], seeded, monkeypatch)
    assert texts.shape == (ROWS, LENGTH)
    assert ROWS % BATCH == 0
    assert fit_p_value(texts, reference_text(TABLE, PROMPT, LENGTH, SETTINGS[setting])) > FLOOR
