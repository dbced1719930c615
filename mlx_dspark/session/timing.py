"""Rounds of the engine's own loop, timed one by one on rows that were filled, not read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import psutil

from mlx_dspark.calibration.plan import Item, depths
from mlx_dspark.contracts import Ask, Drafter, Logits, Observation, Proposal, Source, Target, TargetSpec
from mlx_dspark.drafters.draft_model.drafter import DraftModelDrafter
from mlx_dspark.drafters.draft_model.rows import DraftModelRows
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.engine.drafting import Drafting
from mlx_dspark.engine.loop import Batch, VerifyLoop
from mlx_dspark.engine.rounds import Rounds
from mlx_dspark.engine.row import Row
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.probs import PointMass
from mlx_dspark.nn.row_sampling import RowSampling
from mlx_dspark.state.rows import Capture, RowStates
from mlx_dspark.state.synthetic import bytes_per_token, can_fill, fill

SEED_TOKENS = 8
"""Tokens really fed; deeper rows repeat what is held of them."""
AHEAD = 4
"""Plain rounds that are timed together where each is launched before the last one has landed."""
_CYCLE = 48
"""The tokens of a row repeat after so many, so that lookup always finds what it looks for."""
_CHUNK = 256


TIMED_DRAFTS = 16
"""Drafts of a draft model in the rounds that are timed, however many it makes: each costs about the same."""


def timed(drafter: Drafter) -> Drafter:
    """Who is timed in the place of `drafter`, to be bound where it is another one.

    A draft model's number of drafts is a choice of every run, so the costs are those of one number for all.
    """
    parts: Sequence[Drafter] = getattr(drafter, "parts", (drafter,))
    if not any(isinstance(part, DraftModelDrafter) for part in parts):
        return drafter
    alike = [part.drafting(TIMED_DRAFTS) if isinstance(part, DraftModelDrafter) else part for part in parts]
    return alike[0] if len(alike) == 1 else FirstHit(alike)


def timed_rounds(target: Target, drafter: Drafter, **options: Any) -> RoundTimer:
    """The rounds of the pair as they are timed; `options` are RoundTimer's."""
    alike = timed(drafter)
    if alike is not drafter:
        alike.bind(target)
    return RoundTimer(target, alike, **options)


class _Given:
    """A drafter that proposes tokens at no cost, with the taps of another."""

    name = "given"

    def __init__(self, taps: tuple[int, ...], max_draft: int, vocab: int) -> None:
        self.taps, self.max_draft, self._vocab = taps, max_draft, vocab

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.name, self.max_draft),)

    def bind(self, target: Target) -> None:
        del target

    def new_rows(self, n: int = 1) -> _NoRows:
        return _NoRows(n)

    def observe(self, rows: Any, seen: Observation) -> None:
        del rows, seen

    def blind(self, rows: Any, anchors: Sequence[int], asked: Collection[str]) -> bool:
        del rows, anchors
        return False

    def propose(self, rows: Any, ask: Ask) -> Proposal:
        width = max(ask.caps)
        tokens = mx.array([_tokens(width, self._vocab, at) for at in ask.positions], dtype=mx.int32)
        return Proposal(tokens, tuple(ask.caps), PointMass(tokens, self._vocab), (self.name,) * len(ask.caps))


class _NoRows:
    def __init__(self, n: int) -> None:
        self.depth = [0] * n

    def join(self, other: Any) -> None:
        self.depth += other.depth

    def select(self, rows: Sequence[int]) -> None:
        self.depth = [self.depth[row] for row in rows]


class RoundTimer:
    """The Workload of a pair: `rows` rows, at the depths in `depths`, which follow from the free memory;
    without `deep`, at the first of them only.

    The drafter must be bound to the target. `clock` gives seconds.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        rows: int = 1,
        deep: bool = True,
        available: int | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.rows = rows
        self._target, self._drafter, self._clock = target, drafter, clock
        widest = min(drafter.max_draft, target.spec.context - 2)
        self._given = _Given(drafter.taps, widest, target.spec.vocab)
        self._loop = VerifyLoop(target, self._given)
        self._seed = self._fed()
        self.depths = self._depths(_free() if available is None else available)[: None if deep else 1]
        self._batches = {depth: self._batch(depth) for depth in self.depths}
        self._drafts: dict[int, _DraftTimer] = {}

    @property
    def most(self) -> Mapping[str, int]:
        """The most drafts of each source."""
        return {source.name: source.max_draft for source in self._drafter.sources}

    def run(self, item: Item) -> float:
        """Do the item once; seconds of one round, or of one propose with its observe."""
        if item.source:
            return self._draft_timer(item.depth).run(item.source, item.size)
        batch = self._batches[item.depth]
        self._rewind(batch, item.depth)
        if item.bare:
            return self._bare(batch.states, item.size)
        for row in batch.rows:
            row.caps = FixedCaps({self._given.name: item.size - 1})
        return self._plain(batch) if item.size == 1 and self._target.spec.lazy else self._round(batch)

    def _round(self, batch: Batch) -> float:
        started = self._clock()
        self._loop.land(batch, self._loop.launch(batch))
        return self._clock() - started

    def _plain(self, batch: Batch) -> float:
        """Plain rounds as they run where nothing drafts: each launched before the one before it landed."""
        rounds = Rounds(self._loop, batch)
        rounds.step()
        started = self._clock()
        for _ in range(AHEAD):
            rounds.step()
        seconds = (self._clock() - started) / AHEAD
        rounds.stop()
        return seconds

    def _bare(self, states: RowStates, width: int) -> float:
        feed = mx.array([_tokens(width, self._target.spec.vocab)] * self.rows, dtype=mx.int32)
        started = self._clock()
        transaction = states.begin(width)
        out = self._target.forward(feed, states, taps=self._given.taps, logits=Logits.ALL)
        assert out.logits is not None
        mx.eval(mx.argmax(out.logits, axis=-1))
        transaction.commit([1] * self.rows)
        return self._clock() - started

    # rows ----------------------------------------------------------------------------------------

    def _fed(self) -> Capture:
        """A row after a few real tokens."""
        spec = self._target.spec
        states, n = self._target.new_rows(), max(1, min(SEED_TOKENS, spec.context // 8))
        with states.transaction(n) as transaction:
            feed = mx.array([_tokens(n, spec.vocab)], dtype=mx.int32)
            mx.eval(self._target.forward(feed, states, logits=Logits.LAST).logits)
            transaction.commit([n])
        self._fillable = can_fill(states)
        return states.capture(0)

    def _depths(self, available: int) -> tuple[int, ...]:
        if not self._fillable:
            return (self._seed.depth,)
        return depths(self.rows * bytes_per_token(self._seed), available, self._target.spec.context)

    def _batch(self, depth: int) -> Batch:
        spec = self._target.spec
        states = self._target.new_rows(self.rows)
        if self._fillable:
            fill(states, self._seed, depth)
        else:
            for row in range(self.rows):
                states.restore(row, self._seed)
        request = GenerateRequest(tuple(_tokens(depth, spec.vocab)), spec.context)
        rows = [Row(request, FixedCaps({}), spec.context, spec.vocab) for _ in range(self.rows)]
        noise = RowNoise.of_seeds([0] * self.rows)
        return Batch(rows, states, Drafting(self._given, self.rows), noise)

    def _rewind(self, batch: Batch, depth: int) -> None:
        """Rows are `depth` deep again, with an anchor; what they hold beyond that is written over."""
        batch.states.depth = [depth] * self.rows
        for row in batch.rows:
            row.tokens = [*row.request.prompt, *_tokens(1, self._target.spec.vocab, depth)]
            row.budget, row.reason = row.limit - 1, None

    def _draft_timer(self, depth: int) -> _DraftTimer:
        if depth not in self._drafts:
            timer = _DraftTimer(self._drafter, self._target.spec, self.rows, self._clock)
            timer.fill(depth)
            self._drafts[depth] = timer
        return self._drafts[depth]


class _DraftTimer:
    """Proposals of a drafter whose rows observed tokens with features of noise."""

    def __init__(self, drafter: Drafter, spec: TargetSpec, rows: int, clock: Callable[[], float]) -> None:
        self._drafter, self._clock = drafter, clock
        self._n, self._vocab = rows, spec.vocab
        self._size = len(drafter.taps) * spec.hidden
        self._sampling = RowSampling([SamplingParams()] * rows)
        self._noise = RowNoise.of_seeds([0] * rows)
        self._rows = drafter.new_rows(rows)
        self._depth = 0

    def fill(self, depth: int) -> None:
        """Observe so many tokens, in chunks."""
        for part in getattr(self._rows, "parts", (self._rows,)):
            if isinstance(part, DraftModelRows):
                part.fill(depth)
        while self._depth < depth:
            self._observe(self._seen(min(_CHUNK, depth - self._depth)))

    def run(self, source: str, cap: int) -> float:
        """Seconds to observe what a round of so many drafts usually commits, and to draft as many again."""
        seen = self._seen(cap // 2 + 1)
        started = self._clock()
        self._observe(seen)
        proposal = self._drafter.propose(self._rows, self._ask(source, cap))
        mx.eval(proposal.tokens)
        return self._clock() - started

    def _ask(self, source: str, cap: int) -> Ask:
        anchor = _tokens(1, self._vocab, self._depth)
        caps = {each.name: [cap if each.name == source else 0] * self._n for each in self._drafter.sources}
        return Ask(
            anchors=anchor * self._n,
            caps=[cap] * self._n,
            positions=[self._depth] * self._n,
            sampling=self._sampling,
            noise=self._noise,
            by_source=caps,
        )

    def _seen(self, n: int) -> Observation:
        tokens = _tokens(n, self._vocab, self._depth)
        features = None
        if self._size:
            features = mx.random.normal((self._n, n, self._size), key=mx.random.key(self._depth))
            mx.eval(features)
        return Observation([tokens] * self._n, features, [0] * self._n, [0] * self._n)

    def _observe(self, seen: Observation) -> None:
        self._drafter.observe(self._rows, seen)
        self._depth += len(seen.tokens[0])


def _free() -> int:
    """Bytes that neither the machine nor the device has in use."""
    free = psutil.virtual_memory().available
    total = mx.device_info().get("memory_size")
    return min(free, int(total) - mx.get_active_memory()) if total else free


def _tokens(n: int, vocab: int, at: int = 0) -> list[int]:
    """`n` tokens of a row from position `at` on."""
    cycle = min(_CYCLE, vocab)
    first = (vocab - cycle) // 2
    return [first + (at + i) % cycle for i in range(n)]
