"""The loop of the other ranks: what rank 0 says, done with this rank's part of the target.

They draft and judge as rank 0 does, and take over its caps, drafts and outcomes (`lead.py`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import NoReturn

import mlx.core as mx

from mlx_dspark.contracts import Drafter, Proposal, Target
from mlx_dspark.distributed.link import Link, Message, loss_explained
from mlx_dspark.engine.admit import new_batch
from mlx_dspark.engine.loop import Batch, Outcome, Round, VerifyLoop, pending_arrays
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.errors import RanksLost, RequestError
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.probs import PointMass


class FollowLoop(VerifyLoop):
    """A loop whose caps, drafts and outcomes are told.

    `differed` counts the rounds, of all `rounds`, in which it would have decided otherwise, as another
    rounding may have it where two tokens are all but tied.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, *, prefill_chunk: int = 512, link: Link
    ) -> None:
        super().__init__(target, drafter, prefill_chunk=prefill_chunk)
        self._link = link
        self._told: Message = {}
        self.rounds = self.differed = 0

    def launch_as_told(self, batch: Batch, told: Message) -> Round:
        self._told = told
        round_ = self.launch(batch)
        mx.eval(pending_arrays(batch, round_))
        return round_

    def land_as_told(self, batch: Batch, round_: Round, told: Message) -> None:
        self._told = told
        for row, still_open in zip(batch.rows, told["open"], strict=True):
            if not still_open and not row.finished:
                row.reason = "cancelled"
        self.land(batch, round_)

    def _caps(
        self, batch: Batch, certain: list[list[int]], wants: list[bool]
    ) -> tuple[list[int], dict[str, list[int]]]:
        return self._told["caps"], self._told["by_source"]

    def _propose(self, batch: Batch, caps: list[int], by_source: dict[str, list[int]]) -> Proposal | None:
        own = super()._propose(batch, caps, by_source)
        told = _expected(self._link.hear(), "drafts")
        lengths, source = tuple(told["lengths"]), tuple(told["source"])
        shape = (len(lengths), max(lengths))
        tokens = mx.zeros(shape, mx.int32)
        shared = self._link.share(tokens) if tokens.size else tokens
        q = PointMass(shared, self.target.spec.vocab)
        if own is not None and own.lengths == lengths:
            q = own.q
        return Proposal(shared, lengths, q, source)

    def _settle(self, batch: Batch, round_: Round, outcome: Outcome) -> tuple[list[int], list[list[int]]]:
        accepted, taken = self._told["accepted"], self._told["taken"]
        own = [outcome.committed(r)[: len(each)] for r, each in enumerate(taken)]
        self.rounds += 1
        self.differed += own != taken
        for row, tokens, reason in zip(batch.rows, taken, self._told["reasons"], strict=True):
            row.take(tokens, reason)
        return accepted, taken


class Follower:
    """What a session of another rank than 0 has for an engine: it answers nobody and follows rank 0."""

    def __init__(self, loop: FollowLoop, link: Link) -> None:
        self.loop = loop
        self._link = link
        self._batches: dict[int, Batch] = {}
        self._rounds: dict[int, Round] = {}

    def stream(self, request: GenerateRequest) -> NoReturn:
        """Raises RequestError: rank 0 asks."""
        del request
        raise RequestError(
            f"This process is rank {self._link.rank} of {self._link.size}, and only rank 0 asks.",
            "Call the session's follow() where its rank is not 0.",
        )

    def follow(self) -> None:
        """Do what rank 0 does until it ends. Ctrl-C is rank 0's to hear, and ignored here meanwhile.

        Raises RanksLost when another process is gone, or when what rank 0 says makes no sense here.
        """
        with _deaf_to_interrupts():
            while (told := self._link.hear())["op"] != "end":
                for number in told.get("forgotten", ()):
                    self._batches.pop(number, None)
                    self._rounds.pop(number, None)
                with loss_explained():
                    self._obey(told)

    def _obey(self, told: Message) -> None:
        number, batches = told.get("batch", -1), self._batches
        match told["op"]:
            case "begin":
                batches[number] = self._begun(told)
            case "launch":
                self._rounds[number] = self.loop.launch_as_told(batches[number], told)
            case "land":
                self.loop.land_as_told(batches[number], self._rounds.pop(number), told)
            case "join":
                batches[number].join(batches.pop(told["other"]))
            case "select":
                batches[number].select(told["keep"])
            case "replace":
                batches[number].replace(told["places"], batches.pop(told["other"]))
            case other:
                raise _out_of_step(other)

    def _begun(self, told: Message) -> Batch:
        mx.clear_cache()
        requests = [(index, _request(words)) for index, words in enumerate(told["requests"])]
        batch = new_batch(self.loop.target, self.loop.drafter, FixedCaps({}), requests)
        batch.noise = RowNoise(mx.array(told["keys"], dtype=mx.uint32), tuple(told["seeded"]))
        return batch


def _request(words: Message) -> GenerateRequest:
    sampling = words["sampling"] | {"logit_bias": dict(words["sampling"]["logit_bias"])}
    return GenerateRequest(
        tuple(words["prompt"]),
        words["max_new_tokens"],
        SamplingParams(**sampling),
        frozenset(words["end_ids"]),
    )


def _expected(told: Message, op: str) -> Message:
    if told["op"] != op:
        raise _out_of_step(told["op"])
    return told


def _out_of_step(op: str) -> RanksLost:
    return RanksLost(
        f"Rank 0 says {op!r}, which comes at the wrong moment: the processes fell out of step.",
        "Give every machine the same version, and launch again.",
    )


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
