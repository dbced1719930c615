"""The loop of rank 0 in a run of several processes: it says each thing to the others, then does it.

Caps, drafts, outcomes and ends of texts are rank 0's: they may depend on its clock, its callers and its
rounding. Everything else the others work out as rank 0 does (`follow.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_dspark.contracts import Drafter, Proposal, Target
from mlx_dspark.distributed.link import Link, Message
from mlx_dspark.engine.loop import Batch, Outcome, Round, VerifyLoop, pending_arrays
from mlx_dspark.foundation.errors import RanksLost
from mlx_dspark.foundation.events import EngineEvent
from mlx_dspark.foundation.request import GenerateRequest


class LeadLoop(VerifyLoop):
    """Runs each round on every rank. None is launched ahead: what is said about it could not overtake the
    round in flight. Threads take turns by steps."""

    def __init__(
        self, target: Target, drafter: Drafter | None, *, prefill_chunk: int = 512, link: Link
    ) -> None:
        super().__init__(target, drafter, prefill_chunk=prefill_chunk)
        self._link = link

    def adopt(self, batch: Batch) -> Batch:
        """Raises RanksLost for rows under way: those are read again after an error, which left the ranks at
        different places."""
        if any(row.produced for row in batch.rows):
            raise RanksLost(
                "A round failed, which left the processes at different places.", "Launch it again."
            )
        with self._link.step():
            return LeadBatch(batch, self._link)

    def launch(self, batch: Batch) -> Round:
        """As in one process, but the round is computed on return: no other thread's may run beside it."""
        with self._link.step():
            round_ = super().launch(batch)
            mx.eval(pending_arrays(batch, round_))
            return round_

    def land(self, batch: Batch, round_: Round) -> list[tuple[int, EngineEvent]]:
        with self._link.step():
            return super().land(batch, round_)

    def may_run_ahead(self, batch: Batch, last: Round) -> bool:
        return False

    def _caps(
        self, batch: Batch, certain: list[list[int]], wants: list[bool]
    ) -> tuple[list[int], dict[str, list[int]]]:
        caps, by_source = super()._caps(batch, certain, wants)
        self._link.tell({"op": "launch", "batch": _number(batch), "caps": caps, "by_source": by_source})
        return caps, by_source

    def _propose(self, batch: Batch, caps: list[int], by_source: dict[str, list[int]]) -> Proposal | None:
        proposal = super()._propose(batch, caps, by_source)
        if proposal is None:
            self._link.tell({"op": "drafts", "lengths": [0] * len(caps), "source": []})
            return None
        self._link.tell({"op": "drafts", "lengths": proposal.lengths, "source": proposal.source})
        tokens = proposal.tokens[:, : max(proposal.lengths)].astype(mx.int32)
        shared = self._link.share(tokens) if tokens.size else tokens
        return Proposal(shared, proposal.lengths, proposal.q, proposal.source)

    def _settle(self, batch: Batch, round_: Round, outcome: Outcome) -> tuple[list[int], list[list[int]]]:
        open_rows = [not row.finished for row in batch.rows]
        accepted, taken = super()._settle(batch, round_, outcome)
        self._link.tell(
            {
                "op": "land",
                "batch": _number(batch),
                "open": open_rows,
                "accepted": accepted,
                "taken": taken,
                "reasons": [row.reason for row in batch.rows],
            }
        )
        return accepted, taken


class LeadBatch(Batch):
    """A batch of rank 0, which has a number by which the others know theirs."""

    def __init__(self, batch: Batch, link: Link) -> None:
        super().__init__(batch.rows, batch.states, batch.drafting, batch.noise)
        self._link = link
        self.number = next(link.numbers)
        link.tell(
            {
                "op": "begin",
                "batch": self.number,
                "requests": [_in_words(row.request) for row in batch.rows],
                "keys": batch.noise.keys.tolist(),
                "seeded": batch.noise.seeded,
            }
        )
        weakref.finalize(self, link.forget, self.number).atexit = False

    def join(self, other: Batch) -> None:
        with self._link.step():
            self._link.tell({"op": "join", "batch": self.number, "other": _number(other)})
            super().join(other)

    def replace(self, places: Sequence[int], other: Batch) -> None:
        with self._link.step():
            message = {"op": "replace", "batch": self.number, "places": list(places), "other": _number(other)}
            self._link.tell(message)
            super().replace(places, other)

    def select(self, keep: Sequence[int]) -> None:
        with self._link.step():
            self._link.tell({"op": "select", "batch": self.number, "keep": list(keep)})
            super().select(keep)


def _number(batch: Batch) -> int:
    assert isinstance(batch, LeadBatch)
    return batch.number


def _in_words(request: GenerateRequest) -> Message:
    """A request as `json` carries it. Its stop check stays with rank 0, which says when a text ends."""
    sampling: dict[str, Any] = {name: getattr(request.sampling, name) for name in request.sampling.__slots__}
    sampling["logit_bias"] = list(request.sampling.logit_bias.items())
    return {
        "prompt": list(request.prompt),
        "max_new_tokens": request.max_new_tokens,
        "sampling": sampling,
        "end_ids": sorted(request.end_ids),
    }
