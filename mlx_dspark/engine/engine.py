"""Requests in, events out: admits rows, reads their prompts, runs rounds until every row is finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    `cap` chooses how many drafts are verified; the drafter must be bound to the target already.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        cap: CapPolicy | None = None,
        prefill_chunk: int = 512,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._cap = cap if cap is not None else FixedCaps({})
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
        for index, request in enumerate(requests):
            yield index, Started(len(request.prompt), 0, perf_counter())
            alone = self._admit(request, index)
            while not alone.rows[0].produced:
                yield from self._land(alone, self._loop.launch(alone))
            mx.clear_cache()
            if alone.rows[0].finished:
                continue
            if batch is None:
                batch = alone
            else:
                batch.join(alone)
        if batch is not None:
            yield from self._decode(batch)

    def _admit(self, request: GenerateRequest, index: int) -> Batch:
        spec = self.target.spec
        limit = min(request.max_new_tokens, spec.context - len(request.prompt))
        row = Row(request, self._cap.row(), limit, spec.vocab, index)
        draft = self.drafter.new_rows(1) if self.drafter is not None else None
        return Batch([row], self.target.new_rows(1), draft, RowNoise.of_seeds([request.sampling.seed]))

    def _decode(self, batch: Batch) -> Iterator[tuple[int, EngineEvent]]:
        """Rounds until every row is finished. Rows leave only while no round is in flight."""
        pending = self._loop.launch(batch)
        while True:
            ahead = None
            if self._loop.may_run_ahead(batch, pending):
                ahead = self._loop.launch_ahead(batch, pending)
            yield from self._land(batch, pending)
            if ahead is None:
                live = [i for i, row in enumerate(batch.rows) if not row.finished]
                if not live:
                    return
                if len(live) < len(batch.rows):
                    batch.select(live)
                ahead = self._loop.launch(batch)
            elif all(row.finished for row in batch.rows):
                ahead.transaction.rollback()
                return
            pending = ahead

    def _land(self, batch: Batch, pending: Round) -> Iterator[tuple[int, EngineEvent]]:
        for row, event in self._loop.land(batch, pending):
            yield row.index, event
        for row in batch.rows:
            if row.finished and row.reason is not None and not row.announced:
                row.announced = True
                yield row.index, Finished(row.reason, len(row.request.prompt), row.produced)
