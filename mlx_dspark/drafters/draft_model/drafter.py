"""The generic draft model: a smaller language model drafts one token after the other.

Speculative decoding as it was first described (Leviathan et al. 2023; Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx

from mlx_dspark.contracts import Ask, Observation, Proposal, Source, Target
from mlx_dspark.drafters.draft_model.rows import DraftModelRows
from mlx_dspark.drafters.draw import DraftVocab, draw_of, proposal_of
from mlx_dspark.nn.probs import PointMass

NAME = "draft-model"
"""Of the mode and of the source."""

NUM_DRAFT_TOKENS = 8
"""Most drafts in a round where nobody says; the cap is chosen among them."""


class DraftModelDrafter:
    """Drafts with `model`, whose ids mean what those of the target mean, up to `num_draft_tokens` a round.

    Each round it reads what it has not yet read, at least the anchor, and then its own drafts but the last.
    Where its vocabulary is larger than the target's, the surplus is never drafted; where it is smaller, q of
    what it lacks is 0, and `stand_in` is read in its place. It drafts nothing past its own context.
    `fingerprint` tells its weights apart from others.
    """

    name = NAME
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: Target,
        *,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        stand_in: int = 0,
        fingerprint: str = "",
    ) -> None:
        assert num_draft_tokens >= 1
        self.model = model
        self.fingerprint = fingerprint
        self._most = num_draft_tokens
        self._stand_in = stand_in
        self._vocab: DraftVocab | None = None

    @property
    def max_draft(self) -> int:
        return self._most

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.name, self.max_draft),)

    def drafting(self, num_draft_tokens: int) -> DraftModelDrafter:
        """The same model, for another number of drafts; to be bound by itself."""
        return DraftModelDrafter(
            self.model,
            num_draft_tokens=num_draft_tokens,
            stand_in=self._stand_in,
            fingerprint=self.fingerprint,
        )

    def bind(self, target: Target) -> None:
        """Any target of the same vocabulary fits, which only their tokenizers can tell."""
        own, vocab = self.model.spec.vocab, target.spec.vocab
        self._vocab = DraftVocab(vocab, mx.zeros(own, dtype=mx.int32) if own < vocab else None)

    def new_rows(self, n: int = 1) -> DraftModelRows:
        return DraftModelRows(self.model, n, most=self._most, stand_in=self._stand_in)

    def observe(self, rows: DraftModelRows, seen: Observation) -> None:
        """Reads nothing before READ_AT tokens wait, or the row drafts."""
        rows.see(seen.tokens)

    def blind(self, rows: DraftModelRows, anchors: Sequence[int], asked: Collection[str]) -> bool:
        """Whether every row is past the model's context; else it can draft after any token."""
        return all(depth + 1 >= self.model.spec.context for depth in rows.depth)

    def propose(self, rows: DraftModelRows, ask: Ask) -> Proposal:
        """Draft by draft, none of them waited for."""
        vocab = self._bound
        room = [self.model.spec.context - position for position in ask.positions]
        lengths = [max(0, min(cap, self._most, left)) for cap, left in zip(ask.caps, room, strict=True)]
        active = [place for place, length in enumerate(lengths) if length]
        if not active:
            tokens = mx.zeros((len(lengths), 0), dtype=mx.int32)
            return Proposal(tokens, (0,) * len(lengths), PointMass(tokens, vocab.size))
        for place in active:
            if rows.depth[place] != ask.positions[place]:
                raise ValueError(
                    f"row {place} is at {ask.positions[place]}, and {rows.depth[place]} tokens were seen"
                )
        draw = draw_of(vocab, ask, active)
        logits = rows.feed_anchors(active, ask.anchors)
        drafts: list[mx.array] = []
        while True:
            drafts.append(draw(len(drafts), logits[:, None, : vocab.drafted]))
            mx.async_eval(drafts[-1])
            if len(drafts) == max(lengths):
                break
            logits = rows.feed_drafts(active, drafts[-1])
        tokens = mx.concatenate(drafts, axis=1)
        return proposal_of(self.name, tokens, draw.probs(tokens), lengths, active)

    @property
    def _bound(self) -> DraftVocab:
        if self._vocab is None:
            raise RuntimeError(f"the {self.name} drafter is not bound to a target")
        return self._vocab
