"""Requests in, events out: admits rows, reads their prompts, runs rounds until every row is finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from time import perf_counter

import mlx.core as mx

from mlx_dspark.contracts import Drafter, Target
from mlx_dspark.engine.caps import CapPolicy, FixedCaps
from mlx_dspark.engine.loop import Batch, Round, VerifyLoop
from mlx_dspark.engine.row import Row
from mlx_dspark.engine.sampling import check_sampling
from mlx_dspark.foundation.errors import ContextOverflow, RequestError
from mlx_dspark.foundation.events import EngineEvent, Finished, Started
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.nn.noise import RowNoise


class Engine:
    """Generates from one target with at most one drafter (which may be a composition).

    `cap` chooses how many drafts are verified; the drafter must be bound to the target already. `rectangle`
    holds the rows of a batch in one padded buffer, reads prompts together and lets finished rows leave a
    quarter at a time: the better way from some dozens of rows on. Threads may share an engine: their rounds
    take turns.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        cap: CapPolicy | None = None,
        prefill_chunk: int = 512,
        rectangle: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._cap = cap if cap is not None else FixedCaps({})
        self._rectangle = rectangle
        self._lock = Lock()
        self._loop = VerifyLoop(target, drafter, prefill_chunk=prefill_chunk)

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestError or ContextOverflow when the request cannot run on this target."""
        spec = self.target.spec
        if len(request.prompt) >= spec.context:
            raise ContextOverflow(len(request.prompt), spec.context)
        strangers = [token for token in request.prompt if not 0 <= token < spec.vocab]
        if strangers:
            raise RequestError(
                f"The prompt holds the token id {strangers[0]}; the model's ids end at {spec.vocab - 1}.",
                "Use the model's own tokenizer.",
                field="prompt",
            )
        check_sampling(request.sampling, spec.vocab)

    def stream(self, request: GenerateRequest) -> Iterator[EngineEvent]:
        """The events of one request. Closing the iterator cancels it.

        Raises RequestError before the first event when the request cannot run.
        """
        self.check(request)
        return (event for _, event in self._run([request]))

    def run(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, EngineEvent]]:
        """The events of several requests that run as one batch, each with its request's index."""
        for request in requests:
            self.check(request)
        return self._run(requests)

    def _run(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, EngineEvent]]:
        batch: Batch | None = None
        if self._rectangle:
            for index, request in enumerate(requests):
                yield index, Started(len(request.prompt), 0, perf_counter())
            yield from self._decode(self._admit(list(enumerate(requests))))
            return
        for index, request in enumerate(requests):
            yield index, Started(len(request.prompt), 0, perf_counter())
            alone = self._admit([(index, request)])
            while not alone.rows[0].produced:
                yield from self._land(alone, self._launch(alone))
            mx.clear_cache()
            if alone.rows[0].finished:
                continue
            if batch is None:
                batch = alone
            else:
                batch.join(alone)
        if batch is not None:
            yield from self._decode(batch)

    def _admit(self, requests: Sequence[tuple[int, GenerateRequest]]) -> Batch:
        spec, n = self.target.spec, len(requests)
        rows = []
        for index, request in requests:
            limit = min(request.max_new_tokens, spec.context - len(request.prompt))
            rows.append(Row(request, self._cap.row(), limit, spec.vocab, index))
        draft = self.drafter.new_rows(n) if self.drafter is not None else None
        states = self.target.new_rows(n, rectangle=self._rectangle)
        return Batch(rows, states, draft, RowNoise.of_seeds([r.sampling.seed for _, r in requests]))

    def _decode(self, batch: Batch) -> Iterator[tuple[int, EngineEvent]]:
        """Rounds until every row is finished. Rows leave only while no round is in flight."""
        pending = self._launch(batch)
        while True:
            ahead = None
            if self._may_run_ahead(batch, pending):
                ahead = self._launch(batch, pending)
            yield from self._land(batch, pending, ahead)
            if all(row.finished for row in batch.rows):
                if ahead is not None:
                    ahead.transaction.rollback()
                return
            if ahead is None:
                if self._leaving(batch):
                    batch.select([i for i, row in enumerate(batch.rows) if not row.finished])
                ahead = self._launch(batch)
            pending = ahead

    def _launch(self, batch: Batch, last: Round | None = None) -> Round:
        """The next round, ahead of `last` where one is given."""
        with self._lock:
            return self._loop.launch(batch) if last is None else self._loop.launch_ahead(batch, last)

    def _may_run_ahead(self, batch: Batch, pending: Round) -> bool:
        """A rectangle never does: writing to it while a round in flight reads it would copy it whole."""
        return not self._rectangle and not self._leaving(batch) and self._loop.may_run_ahead(batch, pending)

    def _leaving(self, batch: Batch) -> bool:
        """Whether finished rows should leave now: at once where that is free, else a quarter at a time."""
        finished = sum(row.finished for row in batch.rows)
        return 4 * finished >= len(batch.rows) if self._rectangle else finished > 0

    def _land(
        self, batch: Batch, pending: Round, ahead: Round | None = None
    ) -> Iterator[tuple[int, EngineEvent]]:
        """Land a round and hand out its events; the time that their reader takes is noted on `ahead`."""
        with self._lock:
            events = [(row.index, event) for row, event in self._loop.land(batch, pending)]
        for row in batch.rows:
            if row.reason is not None and not row.announced:
                row.announced = True
                events.append((row.index, Finished(row.reason, len(row.request.prompt), row.produced)))
        handed_at = perf_counter()
        yield from events
        if ahead is not None:
            ahead.waited = perf_counter() - handed_at
