"""Many answers to one prompt, whose noise is the same in every run: what laws of distributions look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mlx_dspark.engine.admit import new_batch
from mlx_dspark.engine.loop import VerifyLoop
from mlx_dspark.engine.rounds import Rounds
from mlx_dspark.foundation.caps import CapPolicy
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.nn.noise import RowNoise


@dataclass(frozen=True)
class Drawn:
    """`texts` `[rows, length]`, and how many drafts were accepted of all."""

    texts: np.ndarray
    accepted: int
    drafted: int


def draw_texts(
    loop: VerifyLoop,
    caps: CapPolicy,
    prompt: tuple[int, ...],
    length: int,
    sampling: SamplingParams,
    *,
    rows: int,
    batch: int,
    seeded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> Drawn:
    """`rows` answers; `batch` of them read their prompt together. Unseeded rows take the noise of fixed
    seeds and stay unseeded."""
    counter, fixed = iter(range(rows)), RowNoise.of_seeds

    def unseeded(seeds: Any) -> RowNoise:
        return replace(fixed([next(counter) for _ in seeds]), seeded=(False,) * len(seeds))

    if not seeded:
        monkeypatch.setattr(RowNoise, "of_seeds", unseeded)
    texts: list[list[int]] = []
    accepted = drafted = 0
    for start in range(0, rows, batch):
        answers: list[list[int]] = [[] for _ in range(batch)]
        requests = [
            GenerateRequest(prompt, length, replace(sampling, seed=start + i if seeded else None))
            for i in range(batch)
        ]
        rounds = Rounds(loop, new_batch(loop.target, loop.drafter, caps, list(enumerate(requests))))
        while not rounds.done:
            for index, event in rounds.step():
                if isinstance(event, Committed):
                    answers[index] += event.tokens
                    accepted, drafted = accepted + event.report.accepted, drafted + event.report.drafted
        texts += answers
    return Drawn(np.array(texts), accepted, drafted)
