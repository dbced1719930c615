"""The two things the loop composes, as protocols: the target that decides and the drafter that proposes.

Targets and drafters are siblings; they meet only in the values of this module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.foundation.source import Source
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.probs import DraftProbs
from mlx_dspark.state.rows import RowStates


class Logits(Enum):
    """Which positions of a forward go through the vocabulary head."""

    ALL = "all"
    LAST = "last"
    NONE = "none"


class Forward(NamedTuple):
    """`logits` `[rows, width | 1 | n, vocab]` or None; `features` `[rows, width, taps * hidden]` or None."""

    logits: mx.array | None
    features: mx.array | None


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What a drafter or the engine may need to know of a target."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    """How many layers a token goes through: of a looped model, as often as they are run."""
    context: int
    name: str = ""
    lazy: bool = True
    """Whether a forward only builds a graph; False when it computes as it goes (CPU kernels)."""


class Target(Protocol):
    """A model that decides every token. Its state lives in RowStates and nowhere else."""

    @property
    def spec(self) -> TargetSpec: ...

    def new_rows(self, n: int = 1, *, rectangle: bool = False) -> RowStates:
        """`n` empty rows, which lie apart or in one padded buffer as suits rows that come and go; always in
        one with `rectangle`, which pays for dozens of them."""
        ...

    def forward(
        self,
        tokens: mx.array,
        rows: RowStates,
        *,
        taps: tuple[int, ...] = (),
        logits: Logits | mx.array = Logits.ALL,
    ) -> Forward:
        """Feed `tokens` `[rows, width]` inside an open transaction of `rows`.

        `logits` says which positions get logits: a Logits, or int32 `[rows, n]` of positions in the feed.

        `taps` name decoder layers, 0-based: the residual stream leaving that layer; -1 is the embedding
        output. The features of the taps are concatenated in the order given.
        """
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings `[..., hidden]` for drafters that borrow them: with the model's scale, before a norm."""
        ...

    def unembed(self, hidden: mx.array) -> mx.array:
        """Raw vocabulary head: no multiplier, no soft cap. `[..., hidden]` to `[..., vocab]`."""
        ...


@dataclass(frozen=True)
class Ask:
    """What a round asks of a drafter. All sequences have one entry per row.

    `anchors` are the newest committed tokens, not yet fed to the target; `caps` the most drafts wanted, or 0;
    `positions` the absolute position of the anchor, which is the row's depth; draft `i` (0-based) is a
    proposal for position `positions[r] + 1 + i`.
    Greedy rows draft the arg-max. Sampled rows draw from their own q with `noise.draft_gumbel`.
    `by_source` holds the caps per drafter name, for a composition to hand on; `caps` is their maximum.
    `thresholds`, per drafter name, are the confidences below which drafts end, for drafters that leave the
    choice to the policy; absent or 0 for none.
    """

    anchors: Sequence[int]
    caps: Sequence[int]
    positions: Sequence[int]
    sampling: Sequence[SamplingParams]
    noise: RowNoise
    by_source: Mapping[str, Sequence[int]] = field(default_factory=dict)
    thresholds: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """Drafts for one round: `tokens` `[rows, width]`, right padded; `lengths[r]` of them count, 0 for a row
    that does not speculate this round. `q` is the distribution each draft was drawn from. `source` says per
    row who drafted, for telemetry only."""

    tokens: mx.array
    lengths: tuple[int, ...]
    q: DraftProbs
    source: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Observation:
    """Tokens that the target has committed to its state, and what it thought of them.

    `tokens[r]` are the newly committed tokens of row `r` (may be empty), whoever proposed them;
    `features` `[rows, width, taps * hidden]` holds at `[r, :len(tokens[r])]` the tapped features of those
    positions; None when the drafter taps nothing. `accepted[r]` of `drafted[r]` drafts were accepted.
    """

    tokens: Sequence[Sequence[int]]
    features: mx.array | None
    drafted: Sequence[int]
    accepted: Sequence[int]


class DraftRows(Protocol):
    """A drafter's own state for some rows. `depth[r]` counts the observed tokens."""

    @property
    def depth(self) -> list[int]: ...

    def join(self, other: Any) -> None:
        """Append the rows of `other`, made by the same drafter, which must not be used afterwards."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        ...


class Drafter(Protocol):
    """Proposes and observes; never decides, never touches target state. `rows` are always its own.

    Laws: any proposal is lossless; every committed token is observed exactly once, in order; a row's
    proposal does not depend on its neighbours; q sums to one.
    """

    @property
    def name(self) -> str:
        """What proposals of this drafter name as their source."""
        ...

    @property
    def sources(self) -> tuple[Source, ...]:
        """The drafters inside: itself, or the parts of a composition."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it wants to see; () when it taps nothing."""
        ...

    @property
    def max_draft(self) -> int:
        """Most drafts it can propose in one round."""
        ...

    def bind(self, target: Target) -> None:
        """Check that the target fits and borrow what is borrowed. Raises DrafterMismatch."""
        ...

    def new_rows(self, n: int = 1) -> DraftRows: ...

    def observe(self, rows: Any, seen: Observation) -> None:
        """Mutates `rows` only."""
        ...

    def blind(self, rows: Any, anchors: Sequence[int], asked: Collection[str]) -> bool:
        """Whether none of the sources that `asked` names could draft for a row in the round after next,
        whatever token follows its anchor.

        The loop may then launch that round before the next one lands. False is always right.
        """
        ...

    def propose(self, rows: Any, ask: Ask) -> Proposal:
        """Drafts for every row with a cap above 0. Mutates nothing that a later `observe` would not mend."""
        ...
