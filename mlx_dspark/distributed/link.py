"""What the processes of one run say to each other: messages of rank 0, over `mx.distributed`.

Every rank must make the same collective calls in the same order, the model's forwards included. So rank 0
says what comes next before it does it, and the others do the same.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from threading import RLock, current_thread, main_thread
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dspark.foundation.errors import FailedElsewhere, LoadError, RanksLost, UsageError
from mlx_dspark.foundation.ranks import launched_rank

FRAME = 1024
"""Bytes of a message's first part, its length included; most messages need no second."""

_BACK_ENDS = ("[ring]", "[jaccl]", "[nccl]", "[mpi]", "[link]")
"""What the messages of errors begin with when a collective call fails."""

_LENGTH = 4
_LONGEST = 1 << 28
_ANSWER = 4096

Message = dict[str, Any]


class Link:
    """One process's end. `rank` 0 speaks (`tell`), the others listen (`hear`)."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.numbers = count()
        self._forgotten: deque[int] = deque()
        self._lock = RLock()
        self._in_step = False
        self._over = False

    # rank 0 --------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """What rank 0 does and the others do after it; from any thread, one at a time.

        Ctrl-C waits for its end, since an interrupted step leaves the others in the middle of it. After an
        error inside, the ranks may be at different places: every later step raises RanksLost.
        """
        with self._lock, _interrupt_held():
            if self._over or not self._in_step:
                raise RanksLost("The other processes of this run are gone.", "Launch it again.")
            self._in_step = False
            with loss_explained():
                yield
            self._in_step = True

    def tell(self, message: Message) -> None:
        """Send a message that `json` can carry to every other rank."""
        if self._forgotten:
            message = message | {
                "forgotten": [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            }
        data = json.dumps(message, default=float).encode()
        first = len(data).to_bytes(_LENGTH, "little") + data[: FRAME - _LENGTH]
        self._sum(np.frombuffer(first.ljust(FRAME, b"\0"), np.uint8))
        if len(data) > FRAME - _LENGTH:
            self._sum(np.frombuffer(data[FRAME - _LENGTH :], np.uint8))

    def forget(self, number: int) -> None:
        """The next message says that this number is not used any more. Takes no lock: the garbage collector
        may call it."""
        self._forgotten.append(number)

    def end(self) -> None:
        """Tell the other ranks that nothing more comes, unless they would not understand it."""
        with self._lock:
            if self.rank == 0 and self._in_step and not self._over:
                self._over = True
                with suppress(RuntimeError):
                    self.tell({"op": "end"})

    # the others ----------------------------------------------------------------------------------

    def hear(self) -> Message:
        """Wait for the next message of rank 0. Raises RanksLost when there is none to come."""
        with loss_explained():
            first = self._sum(np.zeros(FRAME, np.uint8))
            length, data = int.from_bytes(first[:_LENGTH], "little"), first[_LENGTH:]
            if length > _LONGEST:
                raise RuntimeError("[link] a message makes no sense")
            if length > len(data):
                data += self._sum(np.zeros(length - len(data), np.uint8))
            try:
                return json.loads(data[:length])
            except ValueError:
                raise RuntimeError("[link] a message makes no sense") from None

    def outlast_rank_0(self) -> None:
        """Wait until rank 0's process has ended, in silence: MLX says on standard error that it is gone."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
        with suppress(RanksLost):
            self.hear()

    # all -----------------------------------------------------------------------------------------

    def share(self, array: mx.array) -> mx.array:
        """Rank 0's array, lazily; the others give one of the same shape and type."""
        mine = array if self.rank == 0 else mx.zeros_like(array)
        return mx.distributed.all_sum(mine, group=self.group)

    def agree(self, about: Mapping[str, object], error: Exception | None = None) -> None:
        """Go on only when all ranks do, and say the same of what they have. The first thing that they do.

        Where one has an `error`, or says something else than rank 0, every rank raises: rank 0 its own error
        or LoadError naming the rank, the others FailedElsewhere, since rank 0 reports it.
        """
        sentence, next_step = getattr(error, "sentence", str(error)), getattr(error, "next_step", "")
        mine = {"error": [sentence[:1500], next_step[:500]]} if error else {"about": dict(about)}
        answers = self._gather(mine)
        trouble = _trouble(answers)
        if trouble is None:
            self._in_step = True
            return
        if self.rank:
            raise FailedElsewhere(*trouble)
        raise error if error is not None else LoadError(*trouble)

    def _gather(self, mine: Message) -> list[Message]:
        data = json.dumps(mine, default=str).encode()
        assert len(data) <= _ANSWER
        row = mx.array(np.frombuffer(data.ljust(_ANSWER), np.uint8))[None]
        with loss_explained():
            rows = np.array(mx.distributed.all_gather(row, group=self.group))
        return [json.loads(bytes(row)) for row in rows]

    def _sum(self, data: np.ndarray) -> bytes:
        return bytes(np.array(mx.distributed.all_sum(mx.array(data), group=self.group)))


def _trouble(answers: list[Message]) -> tuple[str, str] | None:
    for rank, answer in enumerate(answers):
        if "error" in answer:
            sentence, next_step = answer["error"]
            return f"Rank {rank} cannot load what was asked for: {sentence}", next_step
    first = answers[0]["about"]
    for rank, answer in enumerate(answers):
        for name, value in answer["about"].items():
            if value != first.get(name):
                return (
                    f"Rank {rank} has another {name} than rank 0: {value}, and not {first.get(name)}.",
                    "Give every machine the same files, settings and versions.",
                )
    return None


@contextmanager
def loss_explained() -> Iterator[None]:
    """What MLX raises when another process is gone, as RanksLost."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(_BACK_ENDS):
            raise
        raise RanksLost(
            f"The connection to the other processes of this run is lost: {error}.",
            "See what the others say, and launch it again.",
        ) from error


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block."""
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(before):
        yield
        return
    held: list[tuple[Any, Any]] = []
    signal.signal(signal.SIGINT, lambda signum, frame: held.append((signum, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])


_JOINED: list[Link] = []


def joined() -> Link | None:
    """The link that `join_ranks` made; None where it made none."""
    return _JOINED[0] if _JOINED else None


def join_ranks() -> Link | None:
    """The link to the other processes that a launcher started with this one; None where there are none.

    Rank 0 says goodbye when its program ends. Raises LoadError when they cannot be reached, and UsageError
    when they are at work for another model already.
    """
    rank = launched_rank()
    if rank is None:
        return None
    if _JOINED:
        raise UsageError(
            "The processes of this run have loaded a model already, and they run one.",
            "Launch another run for another model.",
        )
    try:
        group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        raise LoadError(
            f"The other processes of this run cannot be reached: {error}.",
            "Check the hostfile, and that mlx.launch started all of them.",
        ) from error
    if group.size() == 1:
        return None
    link = Link(group)
    _JOINED.append(link)
    atexit.register(link.end)
    return link
