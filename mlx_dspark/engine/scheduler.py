"""Continuous batching: one thread owns MLX, and requests join and leave its batch between rounds.

Everything else posts to that thread and reads events from queues. Between two rounds it hears what was
posted, and `schedule.py` says what comes next.

Stop checks and drafters are anybody's code, and MLX raises what it likes. So any exception is caught where
its cause is known, and handed to the reader of each request it ends; none is swallowed.
"""

from __future__ import annotations

import atexit
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, RLock, Thread, current_thread
from time import perf_counter
from typing import Self

import mlx.core as mx

from mlx_dspark.contracts import Drafter, Target
from mlx_dspark.engine.admit import check_request, new_batch
from mlx_dspark.engine.caps import CapPolicy, FixedCaps
from mlx_dspark.engine.handover import settle
from mlx_dspark.engine.loop import Batch, VerifyLoop
from mlx_dspark.engine.rounds import Indexed, Rounds, endings
from mlx_dspark.engine.schedule import (
    Load,
    Reading,
    Work,
    may_launch_ahead,
    next_work,
    which_prompt,
)
from mlx_dspark.engine.stream import GuardedCheck, Stream, Ticket
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.events import Finished, Started
from mlx_dspark.foundation.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class _End:
    """Told to the engine thread: take nothing more; `drain`: finish what is there, else cancel it."""

    drain: bool


class _Post:
    """What is posted to the engine thread. A ticket that comes again wants to be cancelled; an event wants to
    be set when nothing is left to do."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Ticket | _End | Event] = SimpleQueue()
        self.lock = RLock()
        self.closed = False

    def submit(self, ticket: Ticket) -> None:
        with self.lock:
            if self.closed:
                raise RequestError("The engine is closed.", "Load the model again.")
            self.inbox.put(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Takes no lock: a stream may be dropped by the garbage collector, anywhere."""
        if not (ticket.cancelled or ticket.ended):
            ticket.cancelled = True
            self.inbox.put(ticket)

    def end(self, drain: bool) -> None:
        with self.lock:
            self.closed = True
        self.inbox.put(_End(drain))


class Scheduler:
    """Generates from one target, for up to `max_rows` requests at once, with at most one drafter.

    Submit from any thread. A row that runs alone takes the same path as in an `Engine`, launch-ahead
    included; `loop` makes its loop, as `VerifyLoop` does. A request that fails, fails alone; an error that
    kills a round fails the rows of that round, and the thread lives on.

    Make it in the thread that loaded `target` and `drafter`, and evaluate nothing with them elsewhere. Ends
    with `close`, when it is dropped, or with the program.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        cap: CapPolicy | None = None,
        max_rows: int = 8,
        prefill_chunk: int = 512,
        loop: Callable[..., VerifyLoop] = VerifyLoop,
    ) -> None:
        assert max_rows >= 1
        settle(target, drafter)
        self.target = target
        self.drafter = drafter
        self.max_rows = max_rows
        self._post = _Post()
        rounds_of = loop(target, drafter, prefill_chunk=prefill_chunk)
        worker = _Worker(rounds_of, cap if cap is not None else FixedCaps({}), max_rows, self._post)
        self._thread = Thread(target=worker.run, args=(mx.default_device(),), name="engine", daemon=True)
        _LIVE[self._thread] = self._post
        self._thread.start()
        weakref.finalize(self, self._post.end, False).atexit = False

    def submit(self, request: GenerateRequest) -> Stream:
        """The events of a request, which is queued. Raises RequestError or ContextOverflow when it cannot
        run on this target, or when the engine is closed."""
        check_request(request, self.target.spec)
        ticket = Ticket(request)
        self._post.submit(ticket)
        return Stream(ticket, self._cancel)

    def stream(self, request: GenerateRequest) -> Stream:
        """`submit`, by the name that an `Engine` has for it."""
        return self.submit(request)

    def _cancel(self, ticket: Ticket) -> None:
        """A stream holds this method, and so keeps its engine alive."""
        self._post.cancel(ticket)

    @property
    def running(self) -> bool:
        """Whether the engine thread is alive."""
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the engine has nothing to do, or is closed; False when that took longer than `timeout`
        seconds."""
        idle = Event()
        self._post.inbox.put(idle)
        if not self.running:
            return True
        return idle.wait(timeout)

    def close(self, *, drain: bool = False) -> None:
        """End the thread, from any thread, and wait for it. Requests that are queued or running are finished
        first with `drain`, else cancelled. Closing twice does no harm."""
        self._post.end(drain)
        if current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_LIVE: dict[Thread, _Post] = {}
"""Engine threads and where to post to them, until they end."""


@atexit.register
def _end_all() -> None:
    """MLX must not be at work while the interpreter is taken down."""
    for thread, post in list(_LIVE.items()):
        post.end(False)
        thread.join()


@dataclass(eq=False)
class _Prompt:
    """A prompt being read: a batch of one row."""

    ticket: Ticket
    batch: Batch
    passed_over: int = 0

    @property
    def left(self) -> int:
        return len(self.ticket.request.prompt) - self.batch.states.depth[0]


class _Worker:
    """What the engine thread knows. Only that thread calls anything here but the constructor."""

    def __init__(self, loop: VerifyLoop, cap: CapPolicy, max_rows: int, post: _Post) -> None:
        self._loop = loop
        self._cap = cap
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

    def run(self, device: mx.Device) -> None:
        """The engine thread."""
        reason: Exception = RequestError("The engine is closed.", "Load the model again.")
        try:
            mx.set_default_device(device)
            while self._hear():
                self._work(next_work(self._load, self._max_rows))
        except BaseException as error:  # noqa: BLE001
            reason = RuntimeError(f"The engine thread ended: {error!r}")
        finally:
            self._fall_silent(reason)

    def _fall_silent(self, reason: Exception) -> None:
        """Nothing more is taken; whoever still waits is told why. The thread's streams end here: MLX aborts
        the program where one is still there at its end."""
        with self._post.lock:
            self._post.closed = True
        self._prompts, self._rounds = [], None
        for ticket in [*self._waiting, *self._tickets.values()]:
            ticket.put(reason)
        while True:
            try:
                posted = self._post.inbox.get_nowait()
            except Empty:
                break
            if isinstance(posted, Ticket):
                posted.put(reason)
            elif isinstance(posted, Event):
                posted.set()
        for event in self._idle:
            event.set()
        mx.synchronize()
        mx.clear_streams()
        _LIVE.pop(current_thread(), None)

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

    def _take(self, posted: Ticket | _End | Event) -> None:
        if isinstance(posted, Event):
            self._idle.append(posted)
        elif isinstance(posted, _End):
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
        produced = 0
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        self._prompts = [prompt for prompt in self._prompts if prompt.ticket is not ticket]
        for row in self._rounds.batch.rows if self._rounds else ():
            if row.index == ticket.number:
                row.reason, row.announced, produced = "cancelled", True, row.produced
        self._finish(ticket, Finished("cancelled", len(ticket.request.prompt), produced))
        self._settle_rounds()

    # what is done --------------------------------------------------------------------------------

    @property
    def _load(self) -> Load:
        return Load(
            waiting=len(self._waiting),
            reading=[Reading(prompt.left, prompt.passed_over) for prompt in self._prompts],
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
        try:
            batch = new_batch(
                self._loop.target, self._loop.drafter, self._cap, [(ticket.number, ticket.request)]
            )
            batch = self._loop.adopt(batch)
        except Exception as error:  # noqa: BLE001
            self._finish(ticket, _detached(error))
            return
        row = batch.rows[0]
        if row.stop_check is not None:
            row.stop_check = self._checks[ticket.number] = GuardedCheck(row.stop_check)
        self._prompts.append(_Prompt(ticket, batch))

    def _read(self) -> None:
        """A chunk of one prompt; with its last one the row has its first token and joins the others."""
        place = which_prompt([Reading(prompt.left, prompt.passed_over) for prompt in self._prompts])
        for prompt in self._prompts:
            prompt.passed_over += 1
        prompt = self._prompts[place]
        prompt.passed_over = 0
        try:
            events = self._loop.land(prompt.batch, self._loop.launch(prompt.batch))
        except Exception as error:  # noqa: BLE001
            del self._prompts[place]
            self._finish(prompt.ticket, _detached(error))
            return
        row = prompt.batch.rows[0]
        self._hand_out(events + endings(prompt.batch))
        if row.produced:
            del self._prompts[place]
            mx.clear_cache()
            if not row.finished:
                self._join(prompt.batch)

    def _join(self, batch: Batch) -> None:
        if self._rounds is None:
            self._rounds = Rounds(self._loop, batch)
            return
        try:
            self._rounds.join(batch)
        except Exception as error:  # noqa: BLE001
            self._fail([row.index for row in [*self._rounds.batch.rows, *batch.rows]], error)
            self._rounds = None

    def _round(self) -> None:
        assert self._rounds is not None
        ahead = may_launch_ahead(self._load, self._max_rows) and self._post.inbox.empty()
        try:
            events = self._rounds.step(ahead=ahead)
        except Exception as error:  # noqa: BLE001
            self._round_failed(self._rounds, error)
        else:
            self._hand_out(events)
        self._settle_rounds()

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

    def _round_failed(self, rounds: Rounds, error: Exception) -> None:
        """Rows whose drafts cannot be made fail alone; any other error fails all rows."""
        at_fault = {} if rounds.launched else self._at_fault(rounds.batch)
        for place, own in at_fault.items():
            row = rounds.batch.rows[place]
            row.reason, row.announced = "cancelled", True
            self._fail([row.index], own)
        if not at_fault:
            self._rounds = None
            self._fail([row.index for row in rounds.batch.rows], error)
            mx.clear_cache()

    def _at_fault(self, batch: Batch) -> dict[int, Exception]:
        """Rows for which the drafter raises even alone."""
        found: dict[int, Exception] = {}
        if self._loop.drafter is None:
            return found
        for place in range(len(batch.rows)):
            try:
                self._loop.try_draft(batch, place)
            except Exception as error:  # noqa: BLE001
                found[place] = error
        return found

    def _fail(self, numbers: list[int], error: Exception) -> None:
        error = _detached(error)
        for number in numbers:
            if number in self._tickets:
                self._finish(self._tickets[number], error)


def _detached(error: Exception) -> Exception:
    """The error without its frames, which hold arrays of this thread; where it arose is kept as a note."""
    where = "".join(traceback.format_exception(error))
    error.__cause__ = error.__context__ = None
    error.add_note(f"In the engine thread:\n{where}")
    return error.with_traceback(None)
