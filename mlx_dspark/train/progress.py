"""What a training run says while it works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_dspark.train.loss import LossWeights, Sums


def number(scalar: mx.array) -> float:
    """The value of a real scalar."""
    return float(scalar.item())  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Acceptance:
    """How well blocks were drafted, the true tokens given before each slot.

    `greedy[i]` is the share of blocks whose greedy draft `i` is the target's own choice, of those where all
    drafts before were. `length` is the mean number of tokens a greedy round would commit, the target's own
    included; `expected_length` that of a round sampled at temperature 1.
    """

    greedy: tuple[float, ...]
    length: float
    expected_length: float

    @classmethod
    def of(cls, sums: Sums) -> Acceptance:
        chained: list[float] = sums.chained.tolist()  # pyright: ignore[reportAssignmentType]
        reached: list[float] = sums.reached.tolist()  # pyright: ignore[reportAssignmentType]
        blocks = max(1.0, number(sums.blocks))
        before = [blocks, *chained[:-1]]
        greedy = tuple(now / then if then else 0.0 for now, then in zip(chained, before, strict=True))
        return cls(greedy, 1 + sum(chained) / blocks, 1 + sum(reached) / blocks)


@dataclass(frozen=True)
class TrainStarted:
    """`step` is above 0 when an earlier run goes on. `parameters` are trained; `steps` None: until the time
    limit, in seconds."""

    step: int
    steps: int | None
    time_limit: float | None
    parameters: int
    sequences: int
    steps_per_epoch: int


@dataclass(frozen=True)
class TrainProgress:
    """Means over the steps since the last report, whose losses are `losses`; `step` are done.

    `tokens_per_sec` counts tokens of sequences, padding left out. `target_share` is the share of the time
    that the target's forward takes, measured now and then. `seconds` and `seconds_left` are of training
    alone.
    """

    step: int
    fraction: float
    seconds: float
    seconds_left: float
    losses: tuple[float, ...]
    acceptance: Acceptance
    learning_rate: float
    tokens_per_sec: float
    target_share: float


@dataclass(frozen=True)
class HeldOutMeasured:
    """Loss and acceptance on sequences that are not trained on."""

    step: int
    loss: float
    acceptance: Acceptance


@dataclass(frozen=True)
class CheckpointSaved:
    step: int
    folder: Path


@dataclass(frozen=True)
class TrainFinished:
    """`reason`: `steps` or `time` when the run is complete, `stopped` when it can go on later."""

    step: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class Remark:
    """Something that was done otherwise than one might expect, in a sentence."""

    text: str


TrainEvent = TrainStarted | TrainProgress | HeldOutMeasured | CheckpointSaved | TrainFinished


def measured(step: int, sums: Sums, weights: LossWeights) -> HeldOutMeasured:
    """The event of a measurement."""
    return HeldOutMeasured(step, number(sums.loss(weights)), Acceptance.of(sums))
