"""What a draft model holds of its rows: states that go forward with drafts and back to what was committed.

A row's state is a prefix of what it has seen, and its anchor once that was fed. Drafts that are fed lie in
open transactions until it is seen which of them were committed: those stay, the others are taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_dspark.contracts import Logits, Target
from mlx_dspark.state.rows import RowStates, Transaction
from mlx_dspark.state.synthetic import can_fill, fill

READ_AT = 256
"""Tokens of a row that wait to be read. A row that does not draft so pays for a forward once in so many."""

CHUNK = 512
"""Most tokens of a row that one forward reads."""

TOGETHER = 16
"""Rows in company read so many tokens, and more, by themselves, since all rows wait for the widest."""

SEED = 8
"""Tokens really read where rows are filled."""


@dataclass
class DraftRow:
    """`seen` are the committed tokens. `after` is where the logits after `anchor` are found, once that is fed
    and until it is seen: logits of several rows, and the place among them."""

    seen: list[int] = field(default_factory=list)
    anchor: int | None = None
    after: tuple[mx.array, int] | None = None


@dataclass
class _Fed:
    """Drafts that are fed, one transaction each; `tokens[i]` `[rows, 1]`, which mean nothing but in the rows
    that are `active`."""

    active: Sequence[int]
    transactions: list[Transaction] = field(default_factory=list)
    tokens: list[mx.array] = field(default_factory=list)


class DraftModelRows:
    """Rows of a draft model; `most` is the most drafts in a round. `stand_in` is read in place of a token
    that the model does not know."""

    def __init__(self, model: Target, n: int, *, most: int, stand_in: int = 0) -> None:
        self._model = model
        self._stand_in = stand_in
        self._most = most
        self._states = self._new_states(n)
        self._rows = [DraftRow() for _ in range(n)]
        self._fed: _Fed | None = None

    @property
    def depth(self) -> list[int]:
        return [len(row.seen) for row in self._rows]

    @property
    def read(self) -> list[int]:
        """How many tokens of each row are read for good."""
        return list(self._states.depth)

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, other: DraftModelRows) -> None:
        self._take_back()
        other._take_back()
        self._states.join(other._states)
        self._rows += other._rows

    def select(self, rows: Sequence[int]) -> None:
        self._take_back()
        self._states.select(rows)
        self._rows = [self._rows[row] for row in rows]

    def fill(self, depth: int) -> None:
        """Take so many tokens as read that will be seen, where states can be filled so: for timing."""
        if can_fill(self._states):
            seed = self._new_states(1)
            self._read_alone(seed, [self._stand_in] * min(SEED, depth))
            fill(self._states, seed.capture(0), depth)

    # what was committed --------------------------------------------------------------------------

    def see(self, tokens: Sequence[Sequence[int]]) -> None:
        """Take committed tokens; of the drafts that are fed, keep those among them."""
        self._keep(tokens)
        for place, (row, new) in enumerate(zip(self._rows, tokens, strict=True)):
            if not new:
                continue
            if row.anchor not in (None, new[0]):
                self._forget(place)
            row.seen += new
            row.anchor = row.after = None
        self._read_what_waits()

    def _keep(self, tokens: Sequence[Sequence[int]]) -> None:
        fed, self._fed = self._fed, None
        if fed is None:
            return
        drafts = mx.concatenate(fed.tokens, axis=1).tolist()
        matched = [0] * len(self._rows)
        for place in fed.active:
            matched[place] = _matching(drafts[place], tokens[place][1:])  # pyright: ignore[reportIndexIssue, reportArgumentType]
        for i, transaction in enumerate(fed.transactions):
            transaction.commit([int(count > i) for count in matched])

    def _take_back(self) -> None:
        """Drop the drafts that are fed."""
        fed, self._fed = self._fed, None
        if fed is not None:
            fed.transactions[0].rollback()

    def _forget(self, place: int) -> None:
        """Begin a row's state anew: it holds an anchor that was not committed after all."""
        self._states.replace([place], self._new_states(1))
        self._rows[place].anchor = self._rows[place].after = None

    def _read_what_waits(self) -> None:
        for place, row in enumerate(self._rows):
            within = len(row.seen) <= self._model.spec.context
            if within and len(row.seen) - self._states.depth[place] >= READ_AT:
                self._read(place)
                mx.async_eval(self._states.arrays())

    # reading -------------------------------------------------------------------------------------

    def feed_anchors(self, active: Sequence[int], anchors: Sequence[int]) -> mx.array:
        """Feed what the `active` rows have not read yet, each with its anchor.

        `anchors` are those of all rows. Gives the logits after those of the active rows, `[active, vocab]`.
        """
        self._take_back()
        for place in active:
            row = self._rows[place]
            if row.anchor not in (None, anchors[place]):
                self._forget(place)
            waiting = len(row.seen) - self._states.depth[place]
            if waiting >= (TOGETHER if len(self._rows) > 1 else CHUNK):
                self._read(place)
        feeds = [[anchor] for anchor in anchors]
        keep = [0] * len(anchors)
        for place in active:
            row = self._rows[place]
            if row.after is None:
                feeds[place] = [*row.seen[self._states.depth[place] :], anchors[place]]
                keep[place] = len(feeds[place])
        if any(keep):
            after = self._forward_ragged(feeds, keep)
            for place in active:
                if keep[place]:
                    self._rows[place].anchor, self._rows[place].after = anchors[place], (after, place)
            if all(keep[place] for place in active):
                return after if len(active) == len(keep) else after[mx.array(list(active))]
        found = [after for place in active if (after := self._rows[place].after) is not None]
        return mx.stack([logits[place] for logits, place in found])

    def feed_drafts(self, active: Sequence[int], tokens: mx.array) -> mx.array:
        """Feed the next draft of the active rows, `[active, 1]`; logits after it, `[active, vocab]`."""
        n = len(self._rows)
        if len(active) < n:
            index = {place: i for i, place in enumerate(active)}
            tokens = tokens[mx.array([index.get(place, 0) for place in range(n)])]
        if self._fed is None:
            self._fed = _Fed(tuple(active))
        self._fed.transactions.append(self._states.begin(1))
        self._fed.tokens.append(tokens)
        out = self._model.forward(tokens, self._states, logits=Logits.LAST).logits
        assert out is not None
        return out[:, 0] if len(active) == n else out[mx.array(list(active)), 0]

    def _forward_ragged(self, feeds: list[list[int]], keep: list[int]) -> mx.array:
        """Feed rows of different lengths for good; logits `[rows, vocab]` after the last token of each."""
        width = max(map(len, feeds))
        tokens = self._known([feed + feed[-1:] * (width - len(feed)) for feed in feeds])
        last = [[len(feed) - 1] for feed in feeds]
        level = all(len(feed) == width for feed in feeds)
        wanted = Logits.LAST if level else mx.array(last, dtype=mx.int32)
        with self._states.transaction(width) as transaction:
            out = self._model.forward(tokens, self._states, logits=wanted).logits
            assert out is not None
            transaction.commit(keep)
        return out[:, 0]

    def _read(self, place: int) -> None:
        """Read what a row has seen, by itself where there are others."""
        if len(self._rows) == 1:
            self._read_alone(self._states, self._rows[place].seen)
            return
        alone = self._new_states(1)
        if self._states.depth[place]:
            alone.restore(0, self._states.capture(place))
        self._read_alone(alone, self._rows[place].seen)
        self._states.replace([place], alone)

    def _read_alone(self, states: RowStates, seen: list[int]) -> None:
        while states.depth[0] < len(seen):
            part = seen[states.depth[0] : states.depth[0] + CHUNK]
            with states.transaction(len(part)) as transaction:
                self._model.forward(self._known([part]), states, logits=Logits.NONE)
                transaction.commit([len(part)])
            mx.eval(states.arrays())

    def _known(self, feeds: list[list[int]]) -> mx.array:
        vocab = self._model.spec.vocab
        known = [[token if token < vocab else self._stand_in for token in feed] for feed in feeds]
        return mx.array(known, dtype=mx.int32)

    def _new_states(self, n: int) -> RowStates:
        states = self._model.new_rows(n)
        states.most_open = max(states.most_open, self._most)
        return states


def _matching(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts the tokens begin with."""
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return count
