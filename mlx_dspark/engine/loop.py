"""The round: feed every row `certain + draft`, commit `certain + accepted`.

Prefill, plain decoding and a verified draft are the same round with other lengths. `launch` builds and
schedules it, `land` waits for it once and moves every row. Nothing here knows which model drafts, how a state
is undone, how a token is drawn or how a cap is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx

from mlx_dspark.contracts import Ask, Drafter, Logits, Observation, Proposal, Target
from mlx_dspark.engine.accept import Acceptance, accept
from mlx_dspark.engine.drafting import Drafting
from mlx_dspark.engine.row import Row
from mlx_dspark.engine.times import DEPTH_STEP
from mlx_dspark.foundation.events import (
    UNKNOWN_OUTLOOK,
    Committed,
    EngineEvent,
    Outlook,
    Prefilled,
    RoundReport,
    TokenLogprob,
)
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.row_sampling import RowSampling
from mlx_dspark.state.rows import RowStates, Transaction, replaced


@dataclass
class Batch:
    """Rows that run together, with their states, the drafter's states and their noise, index by index."""

    rows: list[Row]
    states: RowStates
    drafting: Drafting | None
    noise: RowNoise

    def __post_init__(self) -> None:
        self._read_settings()

    def _read_settings(self) -> None:
        self.sampling = RowSampling(row.request.sampling for row in self.rows)
        self.plain: Plain | None = None
        """Of the last round, where no row was to draft in it."""

    def join(self, other: Batch) -> None:
        self.rows += other.rows
        self.states.join(other.states)
        if self.drafting is not None and other.drafting is not None:
            self.drafting.join(self.rows, other.drafting)
        self.noise = self.noise.joined(other.noise)
        self._read_settings()

    def replace(self, places: Sequence[int], other: Batch) -> None:
        """The rows of `other` take these places."""
        both, held = self.rows + other.rows, len(self.rows)
        order = replaced(range(held), places, range(held, len(both)))
        self.rows = [both[i] for i in order]
        self.states.replace(places, other.states)
        if self.drafting is not None and other.drafting is not None:
            self.drafting.join(both, other.drafting)
            self.drafting.select(both, order)
        self.noise = self.noise.joined(other.noise).select(order)
        self._read_settings()

    def select(self, keep: Sequence[int]) -> None:
        if self.drafting is not None:
            self.drafting.select(self.rows, keep)
        self.rows = [self.rows[i] for i in keep]
        self.states.select(keep)
        self.noise = self.noise.select(keep)
        self._read_settings()


@dataclass
class Plain:
    """What was asked of all rows for a plain round; it goes for `rounds` more while `settled` is the same."""

    settled: object
    rounds: int
    by_source: dict[str, list[int]]
    parked: list[bool]
    outlooks: list[Outlook]


@dataclass
class Round:
    """A round in flight. `certain[r]` and `lengths[r]` count the certain and drafted tokens of row `r`;
    `wants[r]`: the row's last certain token is its anchor, so a next token is drawn."""

    transaction: Transaction
    depth: list[int]
    certain: list[int]
    lengths: tuple[int, ...]
    wants: list[bool]
    caps: list[int]
    sources: tuple[str, ...]
    drafts: mx.array | None
    acceptance: Acceptance | None
    features: mx.array | None
    launched_at: float
    parked: list[bool]
    outlooks: list[Outlook]
    waited: float = 0.0
    held_back: bool = False


class VerifyLoop:
    """Runs rounds of a batch. Holds no state between calls but what it was built with."""

    def __init__(self, target: Target, drafter: Drafter | None, *, prefill_chunk: int = 512) -> None:
        assert prefill_chunk >= 1
        self.target = target
        self.drafter = drafter
        self.taps = drafter.taps if drafter is not None else ()
        self.prefill_chunk = prefill_chunk

    def adopt(self, batch: Batch) -> Batch:
        """A new batch, ready for rounds of this loop."""
        return batch

    # launch --------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Round:
        """Build and schedule a round from committed tokens. Does not wait, unless the drafter must."""
        started = perf_counter()
        depth = batch.states.depth
        certain, wants = self._certain(batch)
        plain = self._as_before(batch)
        caps, by_source = self._caps(batch, certain, wants)
        proposal = self._propose(batch, caps, by_source) if any(caps) else None
        lengths = proposal.lengths if proposal is not None else (0,) * len(depth)
        sources = proposal.source if proposal is not None else ()
        feed = _feed(certain, proposal, lengths)
        round_ = Round(
            transaction=batch.states.begin(feed.shape[1]),
            depth=depth,
            certain=[len(c) for c in certain],
            lengths=lengths,
            wants=wants,
            caps=_caps_used(caps, by_source, sources, lengths),
            sources=sources or ("",) * len(depth),
            drafts=proposal.tokens[:, : max(lengths)] if proposal is not None and any(lengths) else None,
            acceptance=None,
            features=None,
            launched_at=started,
            parked=plain.parked if plain else self._parked(batch),
            outlooks=plain.outlooks if plain else self._outlooks(batch, sources, lengths),
        )
        if plain is None:
            batch.plain = self._plain(batch, round_, by_source)
        self._forward(batch, round_, feed, proposal, [row.history for row in batch.rows])
        return round_

    def _as_before(self, batch: Batch) -> Plain | None:
        """What goes for this round as for the last, which was plain."""
        plain = batch.plain
        if plain is None:
            return None
        plain.rounds -= 1
        if plain.rounds < 0 or batch.rows[0].caps.settled(len(batch.rows)) is not plain.settled:
            plain = batch.plain = None
        return plain

    def _plain(self, batch: Batch, round_: Round, by_source: dict[str, list[int]]) -> Plain | None:
        n = len(batch.rows)
        settled = batch.rows[0].caps.settled(n)
        if settled is None or any(row.caps.settled(n) is not settled for row in batch.rows):
            return None
        if any(cap for row in batch.rows for cap in row.caps.caps(n).values()):
            return None
        rounds = min(DEPTH_STEP - depth % DEPTH_STEP for depth in round_.depth) - 3
        return Plain(settled, rounds, by_source, round_.parked, round_.outlooks)

    def launch_ahead(self, batch: Batch, last: Round) -> Round:
        """Build and schedule a plain round on the tokens `last` is about to produce, before it lands."""
        assert last.acceptance is not None
        tokens = last.acceptance.next
        histories = [
            row.history.extended(tokens[i : i + 1]) if row.history is not None else None
            for i, row in enumerate(batch.rows)
        ]
        n, plain = len(batch.rows), self._as_before(batch)
        round_ = Round(
            transaction=batch.states.begin(1),
            depth=[d + c for d, c in zip(last.depth, last.certain, strict=True)],
            certain=[1] * n,
            lengths=(0,) * n,
            wants=[True] * n,
            caps=[0] * n,
            sources=("",) * n,
            drafts=None,
            acceptance=None,
            features=None,
            launched_at=perf_counter(),
            parked=plain.parked if plain else self._parked(batch),
            outlooks=plain.outlooks if plain else self._outlooks(batch, (), (0,) * n),
        )
        if plain is None and self.drafter is not None:
            none = {source.name: [0] * n for source in self.drafter.sources}
            batch.plain = self._plain(batch, round_, none)
        self._forward(batch, round_, tokens[:, None], None, histories)
        return round_

    def may_run_ahead(self, batch: Batch, last: Round) -> bool:
        """Whether the next round may be launched before `last` lands, if no row can draft in it: `last`
        produces all that it is fed, and it is likely to be needed.

        Not in a rectangle: writing to its buffer while a round in flight reads it would copy it whole.
        """
        return (
            self.target.spec.lazy
            and not batch.states.padded
            and last.drafts is None
            and all(last.wants)
            and all(certain == last.transaction.width for certain in last.certain)
            and any(row.budget > 1 and not row.finished for row in batch.rows)
        )

    def cannot_draft(self, batch: Batch) -> bool:
        """Whether no row can draft from the token that the round in flight is about to produce."""
        if batch.drafting is None:
            return True
        if len(batch.rows) == 1 and batch.rows[0].caps.measuring(1):
            return False
        caps = [row.caps.caps(len(batch.rows)) for row in batch.rows]
        asked = {name for each in caps for name, cap in each.items() if cap}
        return not asked or batch.drafting.blind(batch.rows, asked)

    def _certain(self, batch: Batch) -> tuple[list[list[int]], list[bool]]:
        """Per row: the committed tokens to feed next, and whether the anchor is the last of them."""
        depth = batch.states.depth
        certain = [row.tokens[d : d + self.prefill_chunk] for row, d in zip(batch.rows, depth, strict=True)]
        wants = [d + len(c) == len(row.tokens) for row, d, c in zip(batch.rows, depth, certain, strict=True)]
        return certain, wants

    def _parked(self, batch: Batch) -> list[bool]:
        if self.drafter is None:
            return [False] * len(batch.rows)
        return [row.caps.parked(len(batch.rows)) for row in batch.rows]

    def _outlooks(self, batch: Batch, sources: Sequence[str], lengths: Sequence[int]) -> list[Outlook]:
        """What each row expects of a round in which so much was drafted."""
        n, width = len(batch.rows), 1 + max(lengths)
        if self.drafter is None:
            return [UNKNOWN_OUTLOOK] * n
        sources = sources or ("",) * n
        drafts = zip(batch.rows, sources, lengths, strict=True)
        return [row.caps.outlook(n, source, drafted, width) for row, source, drafted in drafts]

    def _caps(
        self, batch: Batch, certain: list[list[int]], wants: list[bool]
    ) -> tuple[list[int], dict[str, list[int]]]:
        """Caps per row, and per source and row; a row drafts only from its anchor, and within its budget."""
        if self.drafter is None:
            return [0] * len(batch.rows), {}
        if batch.plain is not None:
            return [0] * len(batch.rows), batch.plain.by_source
        by_source: dict[str, list[int]] = {source.name: [] for source in self.drafter.sources}
        for row, tokens, wanted in zip(batch.rows, certain, wants, strict=True):
            chosen = row.caps.caps(len(batch.rows))
            room = row.budget - 1 if wanted and len(tokens) == 1 and row.produced else 0
            for name, caps in by_source.items():
                caps.append(max(0, min(chosen.get(name, 0), room)))
        return [max(caps) for caps in zip(*by_source.values(), strict=True)], by_source

    def _propose(self, batch: Batch, caps: list[int], by_source: dict[str, list[int]]) -> Proposal | None:
        assert batch.drafting is not None
        ask = Ask(
            anchors=[row.tokens[-1] for row in batch.rows],
            caps=caps,
            positions=list(batch.states.depth),
            sampling=batch.sampling,
            noise=batch.noise,
            by_source=by_source,
            thresholds=_thresholds(batch),
        )
        return batch.drafting.propose(batch.rows, ask)

    def _forward(
        self,
        batch: Batch,
        round_: Round,
        feed: mx.array,
        proposal: Proposal | None,
        histories: list,
    ) -> None:
        """Run the target on `feed` `[rows, width]` and, where a row wants a token, the accept rule."""
        wanted = _wanted(round_, feed.shape[1])
        out = self.target.forward(feed, batch.states, taps=self.taps, logits=wanted)
        round_.features = out.features
        if out.logits is not None:
            none = mx.zeros((len(batch.rows), 0), mx.int32)
            round_.acceptance = accept(
                out.logits,
                round_.drafts if round_.drafts is not None else none,
                round_.lengths,
                proposal.q if proposal is not None and round_.drafts is not None else None,
                batch.sampling,
                histories,
                batch.noise,
                mx.array([d + c for d, c in zip(round_.depth, round_.certain, strict=True)], dtype=mx.int32),
            )
        mx.async_eval(*_results(round_), *([out.features] if out.features is not None else []))

    # land ----------------------------------------------------------------------------------------

    def land(self, batch: Batch, round_: Round) -> list[tuple[int, EngineEvent]]:
        """Wait for the round, commit what each row keeps, tell the drafter; returns the events, in order."""
        mx.eval(_results(round_) or batch.states.arrays())
        n = len(batch.rows)
        outcome, reports = Outcome.of(round_, n), _Reports(round_, n, perf_counter())
        keep, drafted, accepted = [0] * n, [0] * n, [0] * n
        events: list[tuple[int, EngineEvent]] = []
        running = [not row.finished for row in batch.rows]
        all_accepted, all_taken = self._settle(batch, round_, outcome)
        for r, row in enumerate(batch.rows):
            if not running[r]:
                continue
            taken = all_taken[r]
            if round_.wants[r]:
                drafted[r], accepted[r] = round_.lengths[r], min(all_accepted[r], len(taken))
                if row.history is not None:
                    row.history = row.history.extended(mx.array(taken, dtype=mx.int32))
            keep[r] = round_.certain[r] + len(taken[:-1])
            report = reports.of(r, accepted[r], len(taken))
            if self.drafter is not None:
                row.caps.observe(report)
            total = len(row.request.prompt)
            if report.depth < total:
                done = min(report.depth + report.certain, total)
                events.append((row.index, Prefilled(done, total, report)))
            if taken:
                logprobs = outcome.logprobs(r, taken, row)
                events.append((row.index, Committed(tuple(taken), report, logprobs)))
        round_.transaction.commit(keep)
        if batch.drafting is not None:
            fed = zip(batch.rows, round_.depth, keep, strict=True)
            seen = Observation(
                [row.tokens[depth : depth + kept] for row, depth, kept in fed],
                round_.features,
                drafted,
                accepted,
            )
            batch.drafting.observe(batch.rows, round_.depth, seen)
            events += _troubles(batch.rows)
        return events

    def _settle(self, batch: Batch, round_: Round, outcome: Outcome) -> tuple[list[int], list[list[int]]]:
        """Per row: the drafts accepted, and the tokens it took, which may have ended it."""
        taken = [
            row.commit(outcome.committed(r)) if round_.wants[r] and not row.finished else []
            for r, row in enumerate(batch.rows)
        ]
        return outcome.accepted, taken


def pending_arrays(batch: Batch, round_: Round) -> list[mx.array]:
    """Every array that a launched round is still to compute."""
    features = [round_.features] if round_.features is not None else []
    return [*_results(round_), *features, *batch.states.arrays()]


def _troubles(rows: Sequence[Row]) -> Iterator[tuple[int, EngineEvent]]:
    """Why rows draft no more, once for each, and not after its end."""
    for row in rows:
        if row.trouble is not None and not row.announced:
            yield row.index, row.trouble
            row.trouble = None


def _thresholds(batch: Batch) -> dict[str, list[float]]:
    """Per source that has any, the confidence below which each row's drafts end."""
    by_row = [row.caps.thresholds(len(batch.rows)) for row in batch.rows]
    names = {name for row in by_row for name, threshold in row.items() if threshold}
    return {name: [row.get(name, 0.0) for row in by_row] for name in names}


def _caps_used(
    caps: list[int], by_source: dict[str, list[int]], sources: Sequence[str], lengths: Sequence[int]
) -> list[int]:
    """Per row the cap of the drafter that drafted; the most that any was allowed where none did."""
    if not sources:
        return caps
    drafts = enumerate(zip(sources, lengths, strict=True))
    return [by_source[s][r] if length and s in by_source else caps[r] for r, (s, length) in drafts]


def _feed(certain: list[list[int]], proposal: Proposal | None, lengths: Sequence[int]) -> mx.array:
    """`[rows, width]`: the certain tokens of each row, then its drafts, right padded.

    Padding repeats a token of the row: what a model makes of a token that no text has may be no number, and
    attention that masks it would still spread it.
    """
    drafted = max(lengths)
    if drafted and proposal is not None and all(len(c) == 1 for c in certain):
        anchors, drafts = mx.array(certain, dtype=mx.int32), proposal.tokens[:, :drafted].astype(mx.int32)
        if min(lengths) < drafted:
            drafts = mx.where(mx.arange(drafted) < mx.array(list(lengths))[:, None], drafts, anchors)
        return mx.concatenate([anchors, drafts], axis=1)
    width = max(len(c) + m for c, m in zip(certain, lengths, strict=True))
    if not drafted or proposal is None:
        return mx.array([c + (c[-1:] or [0]) * (width - len(c)) for c in certain], dtype=mx.int32)
    rows = []
    for r, (tokens, m) in enumerate(zip(certain, lengths, strict=True)):
        pad = (tokens[-1:] or [0]) * (width - len(tokens) - m)
        parts = [mx.array(tokens, dtype=mx.int32), proposal.tokens[r, :m].astype(mx.int32)]
        rows.append(mx.concatenate([*parts, mx.array(pad, dtype=mx.int32)]))
    return mx.stack(rows)


def _wanted(round_: Round, width: int) -> Logits | mx.array:
    """The positions whose logits count: slot i of a row is the one after i drafts."""
    drafted = max(round_.lengths)
    if not any(round_.wants):
        return Logits.NONE
    if not drafted and len(set(round_.certain)) == 1:
        return Logits.LAST
    if all(c == 1 for c in round_.certain):
        return Logits.ALL
    slots = [[min(c - 1 + i, width - 1) for i in range(drafted + 1)] for c in round_.certain]
    return mx.array(slots, dtype=mx.int32)


def _results(round_: Round) -> list[mx.array]:
    """The arrays the host reads when the round lands; without drafts none can have been accepted."""
    if round_.acceptance is None:
        return []
    a = round_.acceptance
    drafts = [a.accepted, round_.drafts] if round_.drafts is not None else []
    reported = [a.logprobs] if a.logprobs is not None else []
    return [a.next, *drafts, *reported, *(a.top or ())]


@dataclass(frozen=True)
class Outcome:
    """A round's results as Python numbers; `drafts` is empty when no row drafted."""

    accepted: list[int]
    next: list[int]
    drafts: list[list[int]]
    chosen: list[list[float]] | None
    top: tuple[list, list] | None

    @classmethod
    def of(cls, round_: Round, n: int) -> Outcome:
        a = round_.acceptance
        if a is None:
            return cls([0] * n, [0] * n, [], None, None)
        return cls(
            accepted=a.accepted.tolist() if round_.drafts is not None else [0] * n,  # type: ignore[arg-type]
            next=a.next.tolist(),  # type: ignore[arg-type]
            drafts=round_.drafts.tolist() if round_.drafts is not None else [],  # type: ignore[arg-type]
            chosen=a.logprobs.tolist() if a.logprobs is not None else None,  # type: ignore[arg-type]
            top=(a.top[0].tolist(), a.top[1].tolist()) if a.top is not None else None,  # type: ignore[arg-type]
        )

    def committed(self, row: int) -> list[int]:
        if not self.drafts:
            return [self.next[row]]
        return [*self.drafts[row][: self.accepted[row]], self.next[row]]

    def logprobs(self, r: int, taken: Sequence[int], row: Row) -> tuple[TokenLogprob, ...]:
        if self.chosen is None:
            return ()
        wanted = row.request.sampling.logprobs
        if wanted is None:
            return ()
        answer = []
        for slot, token in enumerate(taken):
            best: Iterator[tuple[int, float]] = iter(())
            if wanted and self.top is not None:
                best = zip(self.top[0][r][slot][:wanted], self.top[1][r][slot][:wanted], strict=True)
            answer.append(TokenLogprob(token, self.chosen[r][slot], tuple(best)))
        return tuple(answer)


class _Reports:
    """The reports of one landed round. Rows that saw the same share one: with many rows, making one for each
    would be the most expensive part of landing."""

    def __init__(self, round_: Round, rows: int, landed_at: float) -> None:
        self._round = round_
        self._rows = rows
        self._landed_at = landed_at
        self._drafted = sum(round_.lengths)
        self._made: dict[tuple[object, ...], RoundReport] = {}

    def of(self, r: int, accepted: int, committed: int) -> RoundReport:
        round_ = self._round
        depth, certain, drafted = round_.depth[r], round_.certain[r], round_.lengths[r]
        source = round_.sources[r] if drafted else ""
        parked = round_.parked[r] and round_.wants[r] and not drafted
        outlook = round_.outlooks[r]
        seen = (depth, certain, round_.caps[r], drafted, accepted, committed, source, parked, outlook)
        report = self._made.get(seen)
        if report is None:
            report = self._made[seen] = RoundReport(
                launched_at=round_.launched_at,
                landed_at=self._landed_at,
                rows=self._rows,
                width=round_.transaction.width,
                certain=certain,
                cap=round_.caps[r],
                drafted=drafted,
                accepted=accepted,
                committed=committed,
                depth=depth,
                source=source,
                parked=parked,
                waited=round_.waited,
                held_back=round_.held_back,
                drafted_together=self._drafted,
                outlook=outlook,
            )
        return report
