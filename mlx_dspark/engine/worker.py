"""The engine thread: the only one that calls MLX. Between two rounds it hears what was posted, and
`schedule.py` says what comes next.

Stop checks and drafters are anybody's code, and MLX raises what it likes. So any exception is caught where
its cause is known, and handed to the reader of each request that it ends or delays; none is swallowed.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import Empty
from threading import Event
from time import perf_counter
from typing import Protocol

import mlx.core as mx

from mlx_dspark.engine.admit import new_batch, read_again
from mlx_dspark.engine.loop import Batch, VerifyLoop
from mlx_dspark.engine.post import End, Post
from mlx_dspark.engine.rounds import Indexed, Rounds, endings
from mlx_dspark.engine.row import Row
from mlx_dspark.engine.schedule import (
    Load,
    Reading,
    Work,
    may_launch_ahead,
    next_work,
    which_prompts,
)
from mlx_dspark.engine.stream import GuardedCheck, Ticket
from mlx_dspark.foundation.caps import CapPolicy
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.events import Finished, Started, Trouble


class Meter(Protocol):
    """Measures what rounds of several rows cost, a little between two of them."""

    def due(self, rows: int) -> bool:
        """Whether so many rows are still to be measured, and it is time for it."""
        ...

    def known(self, rows: int) -> bool:
        """Whether nothing of so many rows is left to be measured."""
        ...

    def step(self, rows: int) -> Exception | None:
        """Do a little of it; raises nothing, and returns what was raised."""
        ...


@dataclass(eq=False)
class _Prompt:
    """A prompt being read: a batch of one row, once there is one. `alone`: it is read with no other."""

    ticket: Ticket
    batch: Batch | None = None
    passed_over: int = 0
    alone: bool = False

    @property
    def reading(self) -> Reading:
        if self.batch is None:
            return Reading(len(self.ticket.request.prompt), self.passed_over, whole=not self.alone)
        return Reading(len(self.batch.rows[0].tokens) - self.batch.states.depth[0], self.passed_over)


class Worker:
    """What the engine thread knows. Only that thread calls anything here but the constructor."""

    def __init__(
        self, loop: VerifyLoop, cap: CapPolicy, max_rows: int, post: Post, meter: Meter | None = None
    ) -> None:
        self._loop = loop
        self._cap = cap
        self._meter = meter
        self._max_rows = max_rows
        self._post = post
        self._waiting: deque[Ticket] = deque()
        self._prompts: list[_Prompt] = []
        self._rounds: Rounds | None = None
        self._tickets: dict[int, Ticket] = {}
        self._checks: dict[int, GuardedCheck] = {}
        self._chunk_last = False
        self._ending = False
        self._idle: list[Event] = []

    def run(self) -> None:
        """The engine thread."""
        reason: Exception = RequestError("The engine is closed.", "Load the model again.")
        try:
            while self._hear():
                self._work(next_work(self._load, self._max_rows))
        except BaseException as error:  # noqa: BLE001
            reason = _detached(RuntimeError(f"The engine thread ended: {error!r}"), error)
        finally:
            self._fall_silent(reason)

    def _fall_silent(self, reason: Exception) -> None:
        """Nothing more is taken; whoever still waits is told why."""
        unheard = self._post.fall_silent()
        self._prompts, self._rounds = [], None
        for ticket in [*self._waiting, *self._tickets.values(), *unheard]:
            if isinstance(ticket, Ticket):
                ticket.put(reason)
        for event in [*self._idle, *unheard]:
            if isinstance(event, Event):
                event.set()

    # what was posted -----------------------------------------------------------------------------

    def _hear(self) -> bool:
        """Take what was posted; waits for it while there is nothing to do. False when that is the end."""
        idle = not (self._waiting or self._prompts or self._rounds)
        if idle:
            for event in self._idle:
                event.set()
            self._idle.clear()
            if self._ending:
                return False
        try:
            while True:
                self._take(self._post.inbox.get(block=idle))
                idle = False
        except Empty:
            return True

    def _take(self, posted: Ticket | End | Event) -> None:
        if isinstance(posted, Event):
            self._idle.append(posted)
        elif isinstance(posted, End):
            self._ending = True
            if not posted.drain:
                for ticket in [*self._waiting, *self._tickets.values()]:
                    self._leave(ticket)
        elif posted.cancelled:
            self._leave(posted)
        else:
            self._waiting.append(posted)

    def _leave(self, ticket: Ticket) -> None:
        """A cancelled request: a waiting or half-read one is gone, a running row leaves with the next round
        that is launched."""
        if ticket.ended:
            return
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        produced = 0
        for row in self._rows():
            if row.index == ticket.number:
                row.reason, row.announced, produced = "cancelled", True, row.produced
        self._prompts = [prompt for prompt in self._prompts if prompt.ticket is not ticket]
        self._finish(ticket, Finished("cancelled", len(ticket.request.prompt), produced))
        self._settle_rounds()

    def _rows(self) -> list[Row]:
        """The rows being read and those that run."""
        batches = [prompt.batch for prompt in self._prompts if prompt.batch is not None]
        if self._rounds is not None:
            batches.append(self._rounds.batch)
        return [row for batch in batches for row in batch.rows]

    # what is done --------------------------------------------------------------------------------

    @property
    def _load(self) -> Load:
        return Load(
            waiting=len(self._waiting),
            reading=[prompt.reading for prompt in self._prompts],
            running=sum(not row.finished for row in self._rounds.batch.rows) if self._rounds else 0,
            in_flight=self._rounds is not None and self._rounds.in_flight is not None,
            chunk_last=self._chunk_last,
        )

    def _work(self, work: Work) -> None:
        self._chunk_last = work is Work.READ
        match work:
            case Work.ADMIT:
                self._admit(self._waiting.popleft())
            case Work.READ:
                self._read()
            case Work.ROUND:
                self._round()
            case Work.REST:
                pass

    def _admit(self, ticket: Ticket) -> None:
        self._tickets[ticket.number] = ticket
        ticket.put(Started(len(ticket.request.prompt), 0, perf_counter()))
        self._prompts.append(_Prompt(ticket))

    def _read(self) -> None:
        """A chunk of one prompt, or several short ones; a row with its first token joins the others."""
        places = which_prompts([prompt.reading for prompt in self._prompts], self._loop.prefill_chunk)
        prompts = [self._prompts[place] for place in places]
        for prompt in self._prompts:
            prompt.passed_over = 0 if prompt in prompts else prompt.passed_over + 1
        batch = prompts[0].batch
        try:
            batch = batch or self._new_batch([prompt.ticket for prompt in prompts])
            events = self._loop.land(batch, self._loop.launch(batch))
        except Exception as error:  # noqa: BLE001
            self._reading_failed(prompts, batch, error)
            return
        prompts[0].batch = batch
        self._hand_out(events + endings(batch))
        if all(
            depth + 1 >= len(row.tokens) for row, depth in zip(batch.rows, batch.states.depth, strict=True)
        ):
            self._prompts = [prompt for prompt in self._prompts if prompt not in prompts]
            mx.clear_cache()
            self._join(batch)

    def _new_batch(self, tickets: Iterable[Ticket]) -> Batch:
        requests = [(ticket.number, ticket.request) for ticket in tickets]
        batch = self._loop.adopt(new_batch(self._loop.target, self._loop.drafter, self._cap, requests))
        for row in batch.rows:
            if row.stop_check is not None:
                row.stop_check = self._checks[row.index] = GuardedCheck(row.stop_check)
        return batch

    def _reading_failed(self, prompts: Sequence[_Prompt], batch: Batch | None, error: Exception) -> None:
        """Prompts that were read together are read again, each alone, unless a token was lost."""
        lost = batch is not None and any(row.produced for row in batch.rows)
        if len(prompts) > 1 and not lost:
            for prompt in prompts:
                prompt.alone = True
                prompt.ticket.put(Trouble.of("read again", error))
            return
        self._prompts = [prompt for prompt in self._prompts if prompt not in prompts]
        self._fail([prompt.ticket.number for prompt in prompts], error)

    def _join(self, batch: Batch) -> None:
        if all(row.finished for row in batch.rows):
            return
        if self._rounds is None:
            self._rounds = Rounds(self._loop, batch)
            return
        rows = [*self._rounds.batch.rows, *batch.rows]
        try:
            self._rounds.join(batch)
        except Exception as error:  # noqa: BLE001
            self._round_failed(rows, error)

    def _round(self) -> None:
        rounds = self._rounds
        assert rounds is not None
        rows, produced = rounds.batch.rows, [row.produced for row in rounds.batch.rows]
        metered = self._meter if self._meter is not None and self._meter.due(len(rows)) else None
        ahead = metered is None and may_launch_ahead(self._load, self._max_rows) and self._post.inbox.empty()
        try:
            events = rounds.step(ahead=ahead)
        except Exception as error:  # noqa: BLE001
            lost = [row for row, before in zip(rows, produced, strict=True) if row.produced != before]
            self._fail([row.index for row in lost], error)
            self._round_failed([row for row in rows if row not in lost], error)
        else:
            self._hand_out(events)
        if metered is not None and rounds.in_flight is None:
            self._tell_unmeasured(rows, metered.step(len(rows)))
        self._settle_rounds()

    def _tell_unmeasured(self, rows: Sequence[Row], error: Exception | None) -> None:
        for row in rows:
            if error is not None and row.index in self._tickets:
                self._tickets[row.index].put(Trouble.of("costs not measured", error))

    def _settle_rounds(self) -> None:
        if self._rounds is not None and self._rounds.done:
            self._rounds.stop()
            self._rounds = None

    # how it ends ---------------------------------------------------------------------------------

    def _hand_out(self, events: list[Indexed]) -> None:
        for number, event in events:
            ticket, check = self._tickets[number], self._checks.get(number)
            if not isinstance(event, Finished):
                ticket.put(event)
            elif check is not None and check.error is not None:
                self._finish(ticket, _detached(check.error))
            else:
                self._finish(ticket, event)

    def _finish(self, ticket: Ticket, end: Finished | Exception) -> None:
        self._tickets.pop(ticket.number, None)
        self._checks.pop(ticket.number, None)
        ticket.put(end)

    def _round_failed(self, rows: Sequence[Row], error: Exception) -> None:
        """Rows that ran in company are read again, each alone, and go on from there: the one at fault then
        fails alone. Once for each row, since company itself may be what fails."""
        self._rounds = None
        for row in rows:
            if len(rows) == 1 or row.read_again:
                self._fail([row.index], error)
            elif row.index in self._tickets:
                self._read_again(row, error)
        mx.clear_cache()

    def _read_again(self, row: Row, error: Exception) -> None:
        row.read_again = True
        ticket = self._tickets[row.index]
        ticket.put(Trouble.of("read again", error))
        try:
            batch = self._loop.adopt(read_again(self._loop.target, self._loop.drafter, row))
        except Exception as own:  # noqa: BLE001
            self._fail([row.index], own)
        else:
            self._prompts.append(_Prompt(ticket, batch))

    def _fail(self, numbers: Iterable[int], error: Exception) -> None:
        error = _detached(error)
        for number in numbers:
            if number in self._tickets:
                self._finish(self._tickets[number], error)


def _detached(error: Exception, cause: BaseException | None = None) -> Exception:
    """The error without its frames, which hold arrays of this thread; where it, or its cause, arose is kept
    as a note."""
    if not any(note.startswith(_WHERE) for note in getattr(error, "__notes__", ())):
        error.add_note(_WHERE + "".join(traceback.format_exception(cause or error)))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


_WHERE = "In the engine thread:\n"
