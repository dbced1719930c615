"""The drafter as the loop calls it. What it raises costs drafts, never text.

The target decides every token, so a row whose drafter raised goes on plainly, to the same text. It is told so
once, by a Trouble.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_dspark.contracts import Ask, Drafter, DraftRows, Observation, Proposal
from mlx_dspark.engine.row import Row

MOST_WAITING = 32
"""Rounds whose features wait to be shown: so many tokens of a row a drafter keeps before it absorbs them."""


class Drafting:
    """What a drafter holds of the rows of a batch: of those that draft, in their order.

    The methods take the rows of the batch and raise nothing that the drafter raised. Rows that cannot draft
    any more stop, and the drafter never hears of them again.

    In company what plain rounds commit is shown to the drafter together, when it is asked for drafts, rows
    change or MOST_WAITING rounds wait: all rows wait for what the host does for each.
    """

    def __init__(self, drafter: Drafter, n: int = 1) -> None:
        self._drafter = drafter
        self._held: DraftRows | None = drafter.new_rows(n)
        self._waiting: list[Observation] = []
        self._since: list[int] = []

    def propose(self, rows: Sequence[Row], ask: Ask) -> Proposal | None:
        """Drafts for every row with a cap above 0; None where no row can draft."""
        self._show_waiting(rows)
        while True:
            places = _drafting(rows)
            if not any(ask.caps[place] for place in places):
                return None
            asked = ask if len(places) == len(rows) else _asked_of(places, ask)
            try:
                proposal = self._proposed(asked)
            except Exception as error:  # noqa: BLE001
                self._stop(rows, self._unable_to_propose(asked, error))
                continue
            return proposal if asked is ask else _spread(proposal, places, len(rows))

    def observe(self, rows: Sequence[Row], depth: Sequence[int], seen: Observation) -> None:
        """Show the drafter what was committed at `depth`, now or later."""
        if len(rows) > 1 and _of_a_plain_round(seen):
            if not self._waiting:
                self._since = list(depth)
            self._waiting.append(seen)
            if len(self._waiting) == MOST_WAITING:
                self._show_waiting(rows)
        else:
            self._show_waiting(rows)
            self._show(rows, depth, seen)

    def _show_waiting(self, rows: Sequence[Row]) -> None:
        """`rows` are those of the rounds that wait."""
        if self._waiting:
            waiting, since = self._waiting, self._since
            self._waiting, self._since = [], []
            self._show(rows, since, _in_one(waiting))

    def _show(self, rows: Sequence[Row], depth: Sequence[int], seen: Observation) -> None:
        places = _drafting(rows)
        if self._held is None or not places:
            return
        if len(places) < len(rows):
            seen, depth = _seen_of(places, seen), [depth[place] for place in places]
        try:
            self._drafter.observe(self._held, seen)
        except Exception as error:  # noqa: BLE001
            self._stop(rows, self._unable_to_observe(self._held, depth, seen, error))

    def blind(self, rows: Sequence[Row], asked: Collection[str]) -> bool:
        """`Drafter.blind` of the rows and their anchors."""
        self._show_waiting(rows)
        places = _drafting(rows)
        if self._held is None or not places:
            return True
        try:
            return self._drafter.blind(self._held, [rows[place].tokens[-1] for place in places], asked)
        except Exception as error:  # noqa: BLE001
            self._stop_all(rows, error)
            return True

    def join(self, rows: Sequence[Row], other: Drafting) -> None:
        """Append what `other` holds; `rows` are those of both."""
        mine = len(self._since) if self._waiting else len(rows) - len(other._since)
        self._show_waiting(rows[:mine])
        other._show_waiting(rows[mine:])
        if self._held is None or other._held is None:
            self._held = self._held or other._held
            return
        try:
            self._held.join(other._held)
        except Exception as error:  # noqa: BLE001
            self._stop_all(rows, error)

    def select(self, rows: Sequence[Row], keep: Sequence[int]) -> None:
        """Keep these of the rows, in this order."""
        self._show_waiting(rows)
        index = {place: i for i, place in enumerate(_drafting(rows))}
        kept = [index[place] for place in keep if place in index]
        if self._held is None or not kept:
            self._held = None
            return
        try:
            self._held.select(kept)
        except Exception as error:  # noqa: BLE001
            self._stop_all(rows, error)

    def _stop_all(self, rows: Sequence[Row], error: Exception) -> None:
        self._held = None
        for row in rows:
            row.stop_drafting(error)

    def _stop(self, rows: Sequence[Row], errors: Mapping[int, Exception]) -> None:
        """Let go of some of the rows held."""
        places = _drafting(rows)
        self.select(rows, [place for i, place in enumerate(places) if i not in errors])
        for i, error in errors.items():
            rows[places[i]].stop_drafting(error)

    def _proposed(self, ask: Ask) -> Proposal:
        proposal = self._drafter.propose(self._held, ask)
        _check(proposal, ask)
        return proposal

    def _unable_to_propose(self, ask: Ask, error: Exception) -> dict[int, Exception]:
        """The rows for which the drafter raises even alone; all that were to draft where there is none."""
        asked = [place for place, cap in enumerate(ask.caps) if cap]
        unable: dict[int, Exception] = {}
        for place in asked if len(asked) > 1 else ():
            try:
                self._proposed(_capped(ask, [cap if r == place else 0 for r, cap in enumerate(ask.caps)]))
            except Exception as own:  # noqa: BLE001
                unable[place] = own
        return unable or dict.fromkeys(asked, error)

    def _unable_to_observe(
        self, held: DraftRows, depth: Sequence[int], seen: Observation, error: Exception
    ) -> dict[int, Exception]:
        """Rows that were not reached are shown theirs after all. Returns those that cannot be mended; all
        rows where none shows why."""
        unable: dict[int, Exception] = {}
        for place, tokens in enumerate(seen.tokens):
            try:
                reached = held.depth[place] - depth[place]
                if not reached and tokens:
                    self._drafter.observe(held, _seen_by_one(place, seen))
                elif reached != len(tokens):
                    unable[place] = error
            except Exception as own:  # noqa: BLE001
                unable[place] = own
        return unable or dict.fromkeys(range(len(depth)), error)


def _of_a_plain_round(seen: Observation) -> bool:
    """Whether every row committed one token, and none of it was drafted."""
    return all(len(tokens) == 1 for tokens in seen.tokens) and not any(seen.drafted)


def _in_one(waiting: Sequence[Observation]) -> Observation:
    """What several plain rounds of the same rows committed, as if one had."""
    last = waiting[-1]
    features = [each.features[:, :1] for each in waiting if each.features is not None]
    return Observation(
        [[token for each in waiting for token in each.tokens[row]] for row in range(len(last.tokens))],
        mx.concatenate(features, axis=1) if len(features) == len(waiting) else None,
        last.drafted,
        last.accepted,
    )


def _drafting(rows: Sequence[Row]) -> list[int]:
    return [place for place, row in enumerate(rows) if row.drafts]


def _asked_of(places: Sequence[int], ask: Ask) -> Ask:
    """What is asked of these rows only."""
    return Ask(
        anchors=[ask.anchors[place] for place in places],
        caps=[ask.caps[place] for place in places],
        positions=[ask.positions[place] for place in places],
        sampling=[ask.sampling[place] for place in places],
        noise=ask.noise.select(places),
        by_source={name: [caps[place] for place in places] for name, caps in ask.by_source.items()},
        thresholds={name: [each[place] for place in places] for name, each in ask.thresholds.items()},
    )


def _capped(ask: Ask, caps: Sequence[int]) -> Ask:
    """The same, with no cap above these."""
    by_source = {
        name: [min(cap, most) for cap, most in zip(each, caps, strict=True)]
        for name, each in ask.by_source.items()
    }
    return replace(ask, caps=list(caps), by_source=by_source)


def _spread(proposal: Proposal, places: Sequence[int], n: int) -> Proposal:
    """A proposal for the rows in these places as one for `n` rows; the others have no draft."""
    index = {place: i for i, place in enumerate(places)}
    spread = [index.get(row, 0) for row in range(n)]
    return Proposal(
        proposal.tokens[mx.array(spread)],
        tuple(proposal.lengths[index[row]] if row in index else 0 for row in range(n)),
        proposal.q.select(spread),
        tuple(proposal.source[index[row]] if row in index else "" for row in range(n))
        if proposal.source
        else (),
    )


def _seen_of(places: Sequence[int], seen: Observation) -> Observation:
    """What was seen of these rows only."""
    return Observation(
        [seen.tokens[place] for place in places],
        seen.features[mx.array(list(places))] if seen.features is not None else None,
        [seen.drafted[place] for place in places],
        [seen.accepted[place] for place in places],
    )


def _seen_by_one(place: int, seen: Observation) -> Observation:
    """What was seen of this row, and nothing of the others."""
    return replace(
        seen,
        tokens=[tokens if r == place else [] for r, tokens in enumerate(seen.tokens)],
        drafted=[count if r == place else 0 for r, count in enumerate(seen.drafted)],
        accepted=[count if r == place else 0 for r, count in enumerate(seen.accepted)],
    )


def _check(proposal: Proposal, ask: Ask) -> None:
    """Raises ValueError where a proposal does not have the shape that was asked for."""
    lengths, shape = proposal.lengths, proposal.tokens.shape
    fits = len(lengths) == len(ask.caps) and all(
        0 <= length <= cap for length, cap in zip(lengths, ask.caps, strict=True)
    )
    if not fits:
        raise ValueError(f"drafts of lengths {list(lengths)} where at most {list(ask.caps)} were asked for")
    if any(lengths) and (len(shape) != 2 or shape[0] != len(lengths) or shape[1] < max(lengths)):
        raise ValueError(f"drafts of shape {shape} for lengths {list(lengths)}")
