"""All answers to one request, joined once for every dialect: an ask goes in, events come out on a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mlx_dspark.serving.answer import Answer
from mlx_dspark.serving.ask import Ask
from mlx_dspark.serving.events import AnswerEvent
from mlx_dspark.serving.model import Model, Rendered


class Generation:
    """Made and read on one event loop; the engine's thread only wakes it."""

    def __init__(self, model: Model, ask: Ask, prompts: Sequence[Rendered]) -> None:
        """Queue every answer. Raises RequestError, and then none is left queued."""
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._failure: Exception | None = None
        self.answers: list[Answer] = []
        try:
            for choice in range(ask.choices):
                prompt, nth = prompts[choice // ask.n], choice % ask.n
                self.answers.append(model.submit(ask, prompt, nth, self._notify))
        except BaseException:
            self.close()
            raise

    def _notify(self) -> None:
        """Called in the engine's thread; a loop that is closed has nobody to wake."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    @property
    def started(self) -> bool:
        """Whether the engine has begun with any of them."""
        return any(answer.started for answer in self.answers)

    @property
    def over(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.over for answer in self.answers)

    async def wait(self, seconds: float) -> bool:
        """Wait until there may be more to read; False when that took too long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        woken = self._wake.is_set()
        self._wake.clear()
        return woken

    def ready(self) -> Iterator[tuple[int, AnswerEvent]]:
        """What has come, with the number of its answer. Raises what made one of them fail."""
        if self._failure is not None:
            raise self._failure
        for number, answer in enumerate(self.answers):
            for event in answer.ready():
                yield number, event

    def fail(self, error: Exception) -> None:
        """Let whoever reads it be told this in place of the rest."""
        self._failure = error
        self._wake.set()

    def close(self) -> None:
        """Cancel what is left."""
        for answer in self.answers:
            answer.close()
