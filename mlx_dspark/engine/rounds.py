"""The rounds of one batch, one after the other, the next one launched ahead where that is allowed."""

from __future__ import annotations

from mlx_dspark.engine.loop import Batch, Round, VerifyLoop
from mlx_dspark.foundation.events import EngineEvent, Finished

Indexed = tuple[int, EngineEvent]


class Rounds:
    """Runs a batch until every row is finished. Rows join and leave only while no round is in flight.

    `in_flight` is the round that was launched ahead and has not landed.
    """

    def __init__(self, loop: VerifyLoop, batch: Batch) -> None:
        self._loop = loop
        self.batch = batch
        self.in_flight: Round | None = None
        self._held_back = False

    @property
    def done(self) -> bool:
        return all(row.finished for row in self.batch.rows)

    def step(self, *, ahead: bool = True) -> list[Indexed]:
        """Land a round and give its events; `ahead` permits to launch the next before this one lands."""
        landing, self.in_flight = self.in_flight or self._launch(), None
        batch = self.batch
        leaving = any(row.finished for row in batch.rows)
        if ahead and not leaving and self._loop.may_run_ahead(batch, landing):
            if self._loop.cannot_draft(batch):
                self.in_flight = self._loop.launch_ahead(batch, landing)
            else:
                self._held_back = True
        events = self._loop.land(batch, landing) + endings(batch)
        if self.done:
            self.stop()
        return events

    def stop(self) -> None:
        """Take back the round in flight, if any."""
        if self.in_flight is not None:
            self.in_flight.transaction.rollback()
            self.in_flight = None

    def join(self, other: Batch) -> None:
        """Append rows that have their first token, but for those that ended with it."""
        assert self.in_flight is None
        _drop_finished(self.batch)
        _drop_finished(other)
        self.batch.join(other)

    def _launch(self) -> Round:
        _drop_finished(self.batch)
        round_ = self._loop.launch(self.batch)
        round_.held_back, self._held_back = self._held_back, False
        return round_


def _drop_finished(batch: Batch) -> None:
    if any(row.finished for row in batch.rows):
        batch.select([place for place, row in enumerate(batch.rows) if not row.finished])


def endings(batch: Batch) -> list[Indexed]:
    """Finished, once, for every row that is."""
    events: list[Indexed] = []
    for row in batch.rows:
        if row.reason is not None and not row.announced:
            row.announced = True
            events.append((row.index, Finished(row.reason, len(row.request.prompt), row.produced)))
    return events
