"""Requests in, events out: admits rows, reads their prompts, runs rounds until every row is finished."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
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

LEAVING = 8
"""Finished rows of a rectangle leave, and others take their places, once they are one in so many."""

Indexed = tuple[int, EngineEvent]


class Engine:
    """Generates from one target with at most one drafter (which may be a composition).

    `cap` chooses how many drafts are verified; the drafter must be bound to the target already. `rectangle`
    holds the rows of a batch in one padded buffer, reads prompts together and lets several finished rows
    leave at once: the better way from some dozens of rows on. Threads may share an engine: their rounds take
    turns.
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
        return (event for _, event in self.run([request]))

    def run(self, requests: Iterable[GenerateRequest], *, live_rows: int | None = None) -> Iterator[Indexed]:
        """The events of several requests that run as one batch, each with its request's index.

        In a rectangle, `live_rows` bounds how many run at once; the next are taken from `requests` as rows
        become free, when all events so far were handed out. Raises RequestError or ContextOverflow when one
        cannot run: before the first event for a sequence of requests, else when it is taken.
        """
        assert live_rows is None or (self._rectangle and live_rows >= 1), "live rows are a rectangle's"
        if isinstance(requests, Sequence):
            for request in requests:
                self.check(request)
        else:
            requests = map(self._checked, requests)
        if self._rectangle:
            return self._run_rectangle(enumerate(requests), live_rows)
        return self._run(requests)

    def _checked(self, request: GenerateRequest) -> GenerateRequest:
        self.check(request)
        return request

    def _run(self, requests: Iterable[GenerateRequest]) -> Iterator[Indexed]:
        batch: Batch | None = None
        for index, request in enumerate(requests):
            alone = yield from self._begun([(index, request)])
            mx.clear_cache()
            if alone.rows[0].finished:
                continue
            if batch is None:
                batch = alone
            else:
                batch.join(alone)
        if batch is not None:
            yield from self._decode(batch)

    def _run_rectangle(
        self, waiting: Iterator[tuple[int, GenerateRequest]], live_rows: int | None
    ) -> Iterator[Indexed]:
        """Rounds of at most `live_rows` rows, nearly all of them unfinished for as long as requests wait.

        None is launched ahead: writing to the buffer while a round in flight reads it would copy it whole.
        """
        first = list(islice(waiting, live_rows))
        if not first:
            return
        batch = yield from self._begun(first)
        while True:
            free = [place for place, row in enumerate(batch.rows) if row.finished]
            if LEAVING * len(free) < len(batch.rows):
                yield from self._land(batch, self._launch(batch))
                continue
            newcomers = list(islice(waiting, len(free)))
            if not newcomers and len(free) == len(batch.rows):
                return
            yield from self._refill(batch, free, newcomers)

    def _refill(
        self, batch: Batch, free: Sequence[int], newcomers: Sequence[tuple[int, GenerateRequest]]
    ) -> Iterator[Indexed]:
        """Rows in `free` places leave; newcomers take these places, and the batch shrinks by the others."""
        if newcomers:
            begun = yield from self._begun(newcomers)
            with self._lock:
                batch.replace(free[: len(newcomers)], begun)
        empty = set(free[len(newcomers) :])
        if empty:
            with self._lock:
                batch.select([place for place in range(len(batch.rows)) if place not in empty])

    def _begun(self, requests: Sequence[tuple[int, GenerateRequest]]) -> Generator[Indexed, None, Batch]:
        """A batch of these requests, run until each has its first token."""
        for index, request in requests:
            yield index, Started(len(request.prompt), 0, perf_counter())
        batch = self._admit(requests)
        while not all(row.produced for row in batch.rows):
            yield from self._land(batch, self._launch(batch))
        return batch

    def _admit(self, requests: Sequence[tuple[int, GenerateRequest]]) -> Batch:
        spec, n = self.target.spec, len(requests)
        rows = []
        for index, request in requests:
            limit = min(request.max_new_tokens, spec.context - len(request.prompt))
            rows.append(Row(request, self._cap.row(), limit, spec.vocab, index))
        draft = self.drafter.new_rows(n) if self.drafter is not None else None
        states = self.target.new_rows(n, rectangle=self._rectangle)
        return Batch(rows, states, draft, RowNoise.of_seeds([r.sampling.seed for _, r in requests]))

    def _decode(self, batch: Batch) -> Iterator[Indexed]:
        """Rounds until every row is finished. Rows leave only while no round is in flight."""
        pending = self._launch(batch)
        while True:
            ahead = None
            leaving = any(row.finished for row in batch.rows)
            if not leaving and self._loop.may_run_ahead(batch, pending):
                ahead = self._launch(batch, pending)
            yield from self._land(batch, pending, ahead)
            if all(row.finished for row in batch.rows):
                if ahead is not None:
                    ahead.transaction.rollback()
                return
            if ahead is None:
                if any(row.finished for row in batch.rows):
                    batch.select([i for i, row in enumerate(batch.rows) if not row.finished])
                ahead = self._launch(batch)
            pending = ahead

    def _launch(self, batch: Batch, last: Round | None = None) -> Round:
        """The next round, ahead of `last` where one is given."""
        with self._lock:
            return self._loop.launch(batch) if last is None else self._loop.launch_ahead(batch, last)

    def _land(self, batch: Batch, pending: Round, ahead: Round | None = None) -> Iterator[Indexed]:
        """Land a round and hand out its events; the time that their reader takes is noted on `ahead`."""
        with self._lock:
            events = self._loop.land(batch, pending)
        for row in batch.rows:
            if row.reason is not None and not row.announced:
                row.announced = True
                events.append((row.index, Finished(row.reason, len(row.request.prompt), row.produced)))
        handed_at = perf_counter()
        yield from events
        if ahead is not None:
            ahead.waited = perf_counter() - handed_at
