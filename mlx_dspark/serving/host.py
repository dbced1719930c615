"""Which model answers, if any, and what the routes of one server share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from mlx_dspark.foundation.errors import ContextOverflow, DsparkError
from mlx_dspark.serving.ask import Ask, Defaults
from mlx_dspark.serving.dialects.base import About, Dialect
from mlx_dspark.serving.dialects.fields import told_names
from mlx_dspark.serving.faults import Refused, refused
from mlx_dspark.serving.gate import Gate
from mlx_dspark.serving.generate import Generation
from mlx_dspark.serving.log import LOG, log_event
from mlx_dspark.serving.model import Model, Rendered
from mlx_dspark.serving.observe.board import Board
from mlx_dspark.serving.stage import Phase, Stage
from mlx_dspark.serving.stats import stats_of
from mlx_dspark.serving.streaming import ARRIVED, Answering, ClientGone, Clock
from mlx_dspark.serving.watch import Vitals

if TYPE_CHECKING:
    from mlx_dspark.serving.loading import Loaded

T = TypeVar("T")
LAST_WORDS = 3.0
"""Seconds in which the last responses may be written."""
_TICK = 0.05
_BETWEEN_STEPS = 0.25
"""Seconds between two steps of a load that those who watch events are told."""


class Host:
    """What the routes share. Used on one event loop.

    `model` None: nothing is loaded; `loaded` is what it came with, where it was loaded by settings. `stage`:
    how far a change of the model has come, None where none is under way. `warnings`: what the user should
    know of the model. `closed`: why no request is taken
    though there is a model, empty where they are. `ending`: the server takes no more requests.
    `logs_prompts`: the log shows what was asked.
    """

    def __init__(
        self,
        model: Model | None,
        defaults: Defaults | None = None,
        *,
        clock: Clock | None = None,
        queue: int = 128,
    ) -> None:
        self.model = model
        self.defaults = defaults or Defaults()
        self.clock = clock or Clock()
        self.gate = Gate(model.engine.max_rows if model is not None else 1, queue)
        self.counting = Gate(1, queue)
        self.loaded: Loaded | None = None
        self.stage: Stage | None = None
        self._told_at = 0.0
        self.warnings: tuple[str, ...] = ()
        self.closed = ""
        self.board = Board()
        self.logs_prompts = False
        self.ending = False
        self._generations: set[Generation] = set()
        self._rendering = ThreadPoolExecutor(1, "render")

    # how it is -----------------------------------------------------------------------------------

    def vitals(self) -> Vitals:
        """How the server is: `ok`, or why it answers nothing now."""
        if self.ending:
            return Vitals("ending", reason="The server is about to end.")
        if self.stage is not None and self.stage.phase in ("draining", "racing"):
            return self._closed(self.stage.phase)
        if self.model is None and self.stage is not None:
            return Vitals("loading", reason="A model is being loaded.")
        if self.model is None:
            return Vitals("no model", reason="No model is loaded. POST /admin/load loads one.")
        return self.model.pulse.vitals()

    def lost(self, seconds: float) -> bool:
        """Whether the engine has delivered nothing for so long that it is not waited for any more."""
        return self.model is not None and self.model.pulse.lost(seconds)

    def _closed(self, phase: Phase) -> Vitals:
        """What is told while requests are refused for a change of the model; an engine that fails, first."""
        engine = Vitals("ok") if self.model is None else self.model.pulse.vitals()
        return Vitals(phase, engine.silent, self.closed) if engine.well else engine

    def health(self, *, private: bool) -> Mapping[str, Any]:
        """What `/health` says; `private` adds what is not for everybody."""
        vitals, model = self.vitals(), self.model
        told: dict[str, Any] = {"status": vitals.state}
        if vitals.reason:
            told["reason"] = vitals.reason
        if not private:
            return told
        told |= {"under_way": self.gate.under_way, "waiting": self.gate.waiting}
        told["silent_seconds"] = round(vitals.silent, 3)
        told["loading"] = None if self.stage is None else self.stage.as_dict()
        told["warnings"] = list(self.warnings)
        if model is not None:
            told |= {
                "model": model.session.name,
                "mode": model.session.mode,
                "context_window": model.context,
                "max_batch": model.engine.max_rows,
                "max_output_tokens": self.defaults.max_tokens_cap,
                "kernels": model.session.live_kernels,
            }
        return told

    # answering -----------------------------------------------------------------------------------

    async def render(self, ask: Ask, gate: Gate) -> tuple[Model, list[Rendered]]:
        """The model that is to answer, and the prompts as it reads them. Raises what refuses them.

        Tokenizers are asked by one thread at a time, and not by the one that keeps every stream alive; what
        waits for it counts as under way in the gate, and its limits of time count.
        """
        model, loop = self.ready(), asyncio.get_running_loop()
        begun = ARRIVED.get() or time.monotonic()
        gate.enter(ask.choices, ask.multiple)
        try:
            prompts: list[Rendered] = []
            for each in ask.prompts:
                rendering = loop.run_in_executor(self._rendering, model.render, each)
                prompts.append(await self._in_time(rendering, begun))
        finally:
            gate.leave(ask.choices)
        return model, prompts

    async def rendered(self, work: Callable[[], T]) -> T:
        """What `work` returns, which asks a tokenizer, in the thread that may."""
        return await asyncio.get_running_loop().run_in_executor(self._rendering, work)

    async def _in_time(self, rendering: asyncio.Future[Rendered], begun: float) -> Rendered:
        try:
            return await asyncio.wait_for(rendering, self.clock.left(begun, begun=False))
        except TimeoutError:
            self.clock.left(begun, begun=False)
            raise

    async def _decoded(self, dialect: Dialect, body: object) -> Ask:
        return await asyncio.to_thread(dialect.decode, body, self.defaults)

    async def count(self, dialect: Dialect, body: object) -> int:
        """The tokens that the prompt of a checked body has, be they too many or not. Raises what refuses it,
        and ContextOverflow where they are too many to count them all."""
        try:
            _, prompts = await self.render(await self._decoded(dialect, body), self.counting)
        except ContextOverflow as error:
            if error.at_least:
                raise
            return error.prompt_tokens
        return sum(len(prompt.ids) for prompt in prompts)

    async def answer(self, dialect: Dialect, body: object) -> Answering:
        """The response to a checked body. Raises what refuses it."""
        ask = await self._decoded(dialect, body)
        model, prompts = await self.render(ask, self.gate)
        while model is not self.ready():
            ask = await self._decoded(dialect, body)
            model, prompts = await self.render(ask, self.gate)
        self.gate.enter(ask.choices, ask.multiple)
        try:
            generation = Generation(model, ask, prompts)
        except BaseException:
            self.gate.leave(ask.choices)
            raise
        return self._answering(dialect, ask, model, prompts, generation)

    def _answering(
        self, dialect: Dialect, ask: Ask, model: Model, prompts: list[Rendered], generation: Generation
    ) -> Answering:
        unheeded = {name for prompt in prompts if prompt.chat for name in prompt.chat.ignored}
        named = [dialect.names.get(name, name) for name in sorted(unheeded)]
        ask = replace(ask, ignored=told_names((*ask.ignored, *named)))
        counts = tuple(len(prompt.ids) for prompt in prompts)
        name = ask.model or model.session.name
        about = About(uuid.uuid4().hex, int(time.time()), name, model.session.mode, counts)
        over = self.board.follow(generation.answers, about)
        self._generations.add(generation)
        begun = time.monotonic()

        def done(error: BaseException | None) -> None:
            self._generations.discard(generation)
            self.gate.leave(ask.choices, time.monotonic() - begun)
            over(error)
            self._log(ask, about, generation, error)

        return Answering(
            generation,
            dialect.encoder(ask, about),
            dialect,
            stream=ask.stream,
            clock=self.clock,
            done=done,
        )

    def _log(self, ask: Ask, about: About, generation: Generation, error: BaseException | None) -> None:
        """One line for every request that was admitted; errors that are nobody's but ours besides."""
        results = [answer.result() for answer in generation.answers]
        stats = stats_of(results, ask.ignored, about.prompt_tokens)
        told = {"id": about.id, "model": about.model, "stream": ask.stream, "answers": ask.choices}
        told |= {"error": None if error is None else type(error).__name__, "stats": stats}
        if self.logs_prompts:
            told["prompts"] = ask.prompts
        log_event("answer", **told)
        expected = DsparkError | Refused | ClientGone | asyncio.CancelledError
        if error is not None and not isinstance(error, expected):
            LOG.error("An answer failed: %r", error, exc_info=error)

    def ready(self) -> Model:
        """The model, where one can answer. Raises Refused where not."""
        vitals = self.vitals()
        if self.closed:
            raise refused("overloaded", self.closed, headers={"retry-after": "5"})
        if self.model is None or vitals.state in ("ending", "dead", "stalled"):
            raise refused("overloaded", vitals.reason, headers={"retry-after": "5"})
        return self.model

    # which model it is ---------------------------------------------------------------------------

    def take(self, loaded: Loaded, warnings: Sequence[str] = ()) -> None:
        """Answer with this model from now on; `warnings` say what the user should know of it."""
        self.warnings = tuple(warnings)
        self.loaded, self.model, self.defaults = loaded, loaded.model, loaded.defaults
        self.gate.resize(loaded.model.engine.max_rows)

    def at(self, stage: Stage | None) -> None:
        """So far has a change of the model come; None: it is over. Within a phase, watchers are told of some
        steps only."""
        before, self.stage, now = self.stage, stage, time.monotonic()
        same = stage is not None and before is not None and stage.phase == before.phase
        if same and now - self._told_at < _BETWEEN_STEPS:
            return
        self._told_at = now
        self.board.tell("load", stage=None if stage is None else stage.as_dict())

    def release(self) -> Model | None:
        """Have no model; returns the one that was there, whose session is to be closed."""
        model, self.model, self.loaded, self.warnings = self.model, None, None, ()
        return model

    async def until_idle(self, seconds: float, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until nobody waits for an answer, or so long, or until it is given up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (self.idle or given_up()):
                    await asyncio.sleep(_TICK)

    async def drain(self, seconds: float, message: str, given_up: Callable[[], bool] = lambda: False) -> None:
        """Let answers be completed for so long; whoever still waits then is told that no more will come."""
        await self.until_idle(seconds, given_up)
        if not given_up():
            self.fail_all(message)
            await self.until_idle(LAST_WORDS)

    # how it ends ---------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._generations

    @property
    def under_way(self) -> int:
        """How many requests the engine has begun with."""
        return sum(generation.started for generation in self._generations)

    def fail_all(self, message: str, *, waiting: bool = False) -> None:
        """Tell everybody who waits that no more will come; `waiting`: only those who have nothing yet."""
        for generation in list(self._generations):
            if not (waiting and generation.started):
                generation.fail(refused("overloaded", message))

    def close(self) -> None:
        """Let go of the thread that renders; the model is its owner's."""
        self._rendering.shutdown(wait=False, cancel_futures=True)
