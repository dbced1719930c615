"""Requests in, events out: admits rows, reads their prompts, runs rounds until every row is finished."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter

import mlx.core as mx

from mlx_dspark.contracts import Drafter, Target
from mlx_dspark.engine.admit import check_request, new_batch
from mlx_dspark.engine.loop import Batch, VerifyLoop
from mlx_dspark.engine.rounds import Indexed, Rounds, endings
from mlx_dspark.engine.streams import Turn
from mlx_dspark.foundation.caps import CapPolicy, FixedCaps
from mlx_dspark.foundation.events import EngineEvent, Started
from mlx_dspark.foundation.request import GenerateRequest

LEAVING = 8
"""Finished rows of a rectangle leave, and others take their places, once they are one in so many."""


class Engine:
    """Generates from one target with at most one drafter (which may be a composition).

    `cap` chooses how many drafts are verified; the drafter must be bound to the target already. `rectangle`
    holds the rows of a batch in one padded buffer whatever their depths, reads prompts together and lets
    several finished rows leave at once: the better way from some dozens of rows on. `loop` makes the loop, as
    `VerifyLoop` does.

    Threads may share an engine: their rounds take turns. But MLX aborts a program at its end when a thread
    that called it ended without `mx.synchronize()` and `mx.clear_streams()`; a `Scheduler` calls it in one
    thread only, and batches requests.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        cap: CapPolicy | None = None,
        prefill_chunk: int = 512,
        rectangle: bool = False,
        loop: Callable[..., VerifyLoop] = VerifyLoop,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._cap = cap if cap is not None else FixedCaps({})
        self._rectangle = rectangle
        self._turn = Turn()
        self._loop = loop(target, drafter, prefill_chunk=prefill_chunk)
        assert not rectangle or type(self._loop) is VerifyLoop, "the other processes would not hold one"

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestError or ContextOverflow when the request cannot run on this target."""
        check_request(request, self.target.spec)

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
                with self._turn:
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
                yield from self._round(batch)
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
            with self._turn:
                batch.replace(free[: len(newcomers)], begun)
        empty = set(free[len(newcomers) :])
        if empty:
            with self._turn:
                batch.select([place for place in range(len(batch.rows)) if place not in empty])

    def _begun(self, requests: Sequence[tuple[int, GenerateRequest]]) -> Generator[Indexed, None, Batch]:
        """A batch of these requests, run until each has its first token."""
        for index, request in requests:
            yield index, Started(len(request.prompt), 0, perf_counter())
        with self._turn:
            batch = self._loop.adopt(
                new_batch(self.target, self.drafter, self._cap, requests, rectangle=self._rectangle)
            )
        while not all(row.produced for row in batch.rows):
            yield from self._round(batch)
        return batch

    def _decode(self, batch: Batch) -> Iterator[Indexed]:
        """Rounds until every row is finished; the time that the reader of the events takes is noted on the
        round in flight."""
        rounds = Rounds(self._loop, batch)
        while not rounds.done:
            with self._turn:
                events = rounds.step()
            handed_at = perf_counter()
            yield from events
            if rounds.in_flight is not None:
                rounds.in_flight.waited = perf_counter() - handed_at

    def _round(self, batch: Batch) -> Iterator[Indexed]:
        """One round, launched and landed."""
        with self._turn:
            pending = self._loop.launch(batch)
        with self._turn:
            events = self._loop.land(batch, pending) + endings(batch)
        yield from events
