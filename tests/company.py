"""One long text beside which a batch grows and shrinks, again and again, while every draft is wrong.

    plan = company(8, seed=1)                    # waves of up to 8 rows, in an order drawn
    findings = in_company(subject, plan)         # what was not as it should be; empty when all was

Members are submitted by the long text's own stop check, so that they join at a given token of it whatever the
threads do. Every answer must be what stock mlx-lm gives to its prompt alone. Whenever the batch has changed,
what is remembered of one of its rows, and its next logits, must be those of a fresh prefill of its text.
Buffers have room for a few tokens only, so that they grow and windows move on all the time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations, product
from typing import Any, Literal
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from mlx_dspark.contracts import Drafter, Target
from mlx_dspark.engine.loop import Batch, Round, VerifyLoop
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.state import kv, window
from mlx_dspark.state.quantized import GROUP
from mlx_dspark.state.rows import RowStates
from mlx_dspark.state.window import WindowState
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, TextOracle, stock_greedy
from tests.tiny import VOCAB
from tests.tiny_families import family_config, tiny_family

DEADLINE = 60.0
PROMPTS = [[(7 * i * i + 31 * n) % 350 + 5 for i in range(n)] for n in (10, 15, 16, 17, 40)]
CAP = 4


# what happens --------------------------------------------------------------------------------------------

Way = Literal["length", "stop", "cancelled"]


@dataclass(frozen=True)
class Member:
    """A request that is submitted at token `at` of the long text. It leaves at its own limit, or when the
    long text is at token `leaves`: by a stop check, or cancelled."""

    prompt: int
    at: int
    leaves: int
    way: Way

    @property
    def new(self) -> int:
        """More than it comes to, where it is not its limit that ends it."""
        return self.leaves - self.at + (0 if self.way == "length" else 3)


@dataclass(frozen=True)
class Company:
    """`rows`: the most that run at once; `prompt`, `new`: the long text's."""

    rows: int
    prompt: int
    new: int
    members: tuple[Member, ...]

    @property
    def longest(self) -> dict[int, int]:
        """By prompt, the most tokens that somebody asks for."""
        asked = [(self.prompt, self.new), *((member.prompt, member.new) for member in self.members)]
        return {prompt: max(new for p, new in asked if p == prompt) for prompt, _ in asked}


def company(rows: int, *, seed: int | str, new: int = 201, prompt: int = 0) -> Company:
    """Waves in each of which the batch grows and shrinks to one again: first to `rows`, then to sizes drawn.
    Prompts come in an order drawn and leave in another, in ways drawn. With one row, all wait."""
    draw = random.Random(seed)
    kinds: tuple[Way, ...] = ("length", "stop", "cancelled")
    members: list[Member] = []
    at, size = 2, max(2, rows)
    while at + 6 * size < new:
        n = size - 1
        others = draw.sample(range(len(PROMPTS)), len(PROMPTS)) + draw.choices(range(len(PROMPTS)), k=n)
        ways = draw.choices(kinds, (6, 3, 1), k=n)
        members += wave(at, others[:n], draw.sample(range(n), n), ways, apart=draw.randint(1, 2))
        at += 6 * size + draw.randint(0, 6)
        size = draw.randint(2, max(2, rows // 3 + 1))
    return Company(rows, prompt, new, tuple(members))


def every_order(n: int = 3, long: int = 450) -> list[Company]:
    """Every order in which `n` prompts may join a text, and for each every order in which they may leave."""
    orders = list(product(permutations(range(1, n + 1)), permutations(range(n))))
    step = 6 * (n + 1)
    parts = [orders[i : i + long // step] for i in range(0, len(orders), long // step)]
    return [
        Company(
            n + 1,
            0,
            len(part) * step,
            tuple(
                member
                for i, order in enumerate(part)
                for member in wave(2 + i * step, *order, ways=("stop",) * n)
            ),
        )
        for part in parts
    ]


def wave(
    begin: int, prompts: Sequence[int], turns: Sequence[int], ways: Sequence[Way], *, apart: int = 1
) -> list[Member]:
    """Members that join one after the other, `apart` tokens lying between them, and leave by their `turns`
    once all have joined."""
    joined = begin + 3 * len(prompts)
    return [
        Member(prompt, begin + i * apart, joined + 2 * turn, way)
        for i, (prompt, turn, way) in enumerate(zip(prompts, turns, ways, strict=True))
    ]


# whose answers -------------------------------------------------------------------------------------------


class Subject:
    """A tiny random model of a family, our target for it and its solo texts; `bits` of its keys, if few."""

    def __init__(self, family: str, *, bits: int | None = None, seed: int = 1) -> None:
        wide = bits is not None
        self.bits = bits
        self.model: Any = tiny_family(family, seed=seed, wide=wide)
        self.target: DenseTarget = target_of(
            self.model, family_config(family, wide=wide), context=512, kv_bits=bits
        )
        self._texts: dict[int, list[int]] = {}

    def text(self, prompt: int, new: int) -> list[int]:
        """So many greedy tokens of mlx-lm's model over its caches, those that grow quantized to `bits`."""
        if len(self._texts.get(prompt, ())) < new:
            self._texts[prompt] = self._solo(PROMPTS[prompt], new)
        return self._texts[prompt][:new]

    def _solo(self, tokens: list[int], new: int) -> list[int]:
        if self.bits is None:
            return stock_greedy(self.model, tokens, new)
        caches = [_quantized(cache, self.bits) for cache in make_prompt_cache(self.model)]
        text: list[int] = []
        for _ in range(new):
            newest: Any = mx.argmax(self.model(mx.array([tokens]), cache=caches)[0, -1])
            tokens = [newest.item()]
            text += tokens
        return text

    def always_wrong(self, plan: Company) -> ScriptedDrafter:
        texts = [[*PROMPTS[p], *self.text(p, new), *[9] * CAP] for p, new in plan.longest.items()]
        return ScriptedDrafter(TextOracle(texts), 0.0, vocab=VOCAB, ragged=True)


def _quantized(cache: Any, bits: int) -> Any:
    """The cache, or those of a list of caches that grow, in few bits."""
    if type(cache) is CacheList:
        return CacheList(*(_quantized(each, bits) for each in cache.caches))
    return QuantizedKVCache(GROUP, bits) if type(cache) is KVCache else cache


# what is found -------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """`wrong` says what was not as it should be; `sizes` counts rounds by their rows, `compared` the states
    that were held against a fresh prefill."""

    wrong: list[str] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)
    compared: int = 0


class WatchedLoop(VerifyLoop):
    """Counts rounds, and compares a row with a fresh prefill at every third change of the batch."""

    def __init__(
        self, findings: Findings, compares: bool, target: Target, drafter: Drafter | None, **options: Any
    ) -> None:
        super().__init__(target, drafter, **options)
        self._findings = findings
        self._compares = compares
        self._draw = random.Random(0)
        self._last: list[int] = []
        self._changes = 0

    def land(self, batch: Batch, round_: Round) -> list[tuple[int, EngineEvent]]:
        events = super().land(batch, round_)
        if max(round_.certain) == 1:
            self._findings.sizes[len(batch.rows)] += 1
            members = [row.index for row in batch.rows]
            self._changes += members != self._last
            if self._compares and members != self._last and self._changes % 3 == 0:
                self._compare(batch, self._draw.randrange(len(members)))
            self._last = members
        return events

    def _compare(self, batch: Batch, place: int) -> None:
        rows = batch.states
        text, fresh = batch.rows[place].tokens[: rows.depth[place]], self.target.new_rows()
        whole = fed(self.target, fresh, [[*text, 9, 8]], [len(text)])[0, -2:]
        what = f"row {place} of {len(rows)} at {len(text)} tokens"
        if not same_content(rows, place, fresh):
            self._findings.wrong.append(f"{what}: the states are not those of a fresh prefill")
        if not close(fed(self.target, rows, [[9, 8]] * len(rows), [0] * len(rows))[place], whole):
            self._findings.wrong.append(f"{what}: the next logits are not those of a fresh prefill")
        self._findings.compared += 1


class Conductor:
    """The long text's stop check: submits and cancels the members at their tokens."""

    def __init__(self, plan: Company, engine: Scheduler) -> None:
        self._plan = plan
        self._engine = engine
        self._token = 0
        self.streams: dict[Member, Stream] = {}

    def __call__(self, token: int) -> bool:
        self._token += 1
        for member in self._plan.members:
            if member.at == self._token:
                self.streams[member] = self._engine.submit(self._request(member))
            if (member.leaves, member.way) == (self._token, "cancelled"):
                self.streams[member].cancel()
        return False

    def _request(self, member: Member) -> GenerateRequest:
        check = (lambda token: self._token >= member.leaves) if member.way == "stop" else None
        return GenerateRequest(tuple(PROMPTS[member.prompt]), member.new, stop_check=check)


def in_company(subject: Subject, plan: Company) -> Findings:
    """Run `plan` against a drafter that is always wrong."""
    findings, drafter = Findings(), subject.always_wrong(plan)
    loop, caps = partial(WatchedLoop, findings, subject.bits is None), FixedCaps({"scripted": CAP})
    with (
        small_buffers(),
        Scheduler(
            subject.target, drafter, cap=caps, max_rows=plan.rows, prefill_chunk=11, loop=loop
        ) as engine,
    ):
        check = Conductor(plan, engine)
        long = engine.submit(GenerateRequest(tuple(PROMPTS[plan.prompt]), plan.new, stop_check=check))
        _judge(findings, subject, Member(plan.prompt, 0, plan.new, "length"), long)
        assert len(check.streams) == len(plan.members)
        for member, stream in check.streams.items():
            _judge(findings, subject, member, stream)
    return findings


@contextmanager
def small_buffers(size: int = 16) -> Iterator[None]:
    """Keys and values are held in buffers that grow, and move on, by so many positions."""
    defaults = WindowState.__init__.__kwdefaults__
    assert defaults is not None
    with (
        patch.object(kv, "STEP", size),
        patch.object(window, "ROOM", size),
        patch.dict(defaults, slack=size),
    ):
        yield


def read(stream: Stream) -> tuple[list[tuple[int, ...]], str]:
    """The tokens of each round of an answer, and why it ended."""
    rounds: list[tuple[int, ...]] = []
    while True:
        event = stream.next(DEADLINE)
        if isinstance(event, Committed):
            rounds.append(event.tokens)
        if isinstance(event, Finished):
            return rounds, event.reason


def _judge(findings: Findings, subject: Subject, member: Member, stream: Stream) -> None:
    rounds, reason = read(stream)
    answer = [token for tokens in rounds for token in tokens]
    truth = subject.text(member.prompt, member.new)
    if len(rounds) != len(answer):
        findings.wrong.append(f"{member}: a wrong draft was accepted")
    if reason != member.way:
        findings.wrong.append(f"{member}: ended by {reason}")
    if answer != (truth if member.way == "length" else truth[: len(answer)]):
        findings.wrong.append(f"{member}: {answer} is not {truth}")


# states --------------------------------------------------------------------------------------------------


def fed(target: Target, rows: RowStates, tokens: list[list[int]], keep: Sequence[int]) -> mx.array:
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
