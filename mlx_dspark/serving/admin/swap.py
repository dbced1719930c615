"""Which model the host has: loaded, swapped and unloaded, one change at a time.

A swap finds, fetches and checks the next model while the present one answers. Only then are its answers
waited for and its memory is given back; where reading the next one fails after all, the present one is loaded
again as it was.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from logging import WARNING
from threading import Event
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_dspark.calibration.bandwidth import bandwidth_here
from mlx_dspark.foundation.errors import DsparkError, EngineLost, LoadCancelled
from mlx_dspark.foundation.numbers import brief
from mlx_dspark.foundation.ranks import launched_rank
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import DEFAULT_MODEL, LoadSettings
from mlx_dspark.serving.admin.body import as_json
from mlx_dspark.serving.admin.threads import in_mlx_thread
from mlx_dspark.serving.faults import Fault, Refused, refused
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.loading import Loaded, load_model
from mlx_dspark.serving.log import LOG, log_event
from mlx_dspark.serving.stage import Phase, Stage
from mlx_dspark.session.examine import examine
from mlx_dspark.session.traffic import held_bytes

if TYPE_CHECKING:
    from mlx_dspark.catalog.progress import LoadProgress, Progress

Note = Callable[[str], None]

_LOAD = "load"
_LATE: tuple[Phase, ...] = ("restoring", "racing")
"""What is not stopped once it has begun."""


class _Stop(BaseException):
    """Raised through a load that somebody asked to stop: no handler of errors takes it for one."""


class Swap:
    """Changes the host's model; used on the host's event loop. `started` is what the server was started
    with, `failure` what was said of the last load that failed, `cancelled` whether the last load ended so,
    `names` what the last load named."""

    def __init__(self, host: Host, started: tuple[LoadSettings, ServeSettings]) -> None:
        self.host = host
        self.started = started
        self.failure = ""
        self.names: tuple[str, ...] = ()
        self._progress: Progress | None = None
        self.cancelled = False
        self._stop = Event()
        self._change = ""
        self._first = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._task is not None and not self._task.done()

    # what may be asked ---------------------------------------------------------------------------

    async def load(self, loading: LoadSettings, settings: ServeSettings) -> None:
        """Load a model in the place of the present one. Raises Refused while another change is under way, and
        UsageError, LoadError, DownloadError or LoadCancelled.

        Goes on when whoever waits for it does not.
        """
        await self._only(_LOAD, self._load(loading, settings))

    async def load_first(self, progress: Progress | None, note: Note) -> None:
        """Load what the server was started with; `progress` and `note` are told of it, as the host is."""
        self._progress, self._first = progress, True
        try:
            await self.load(*self.started)
        finally:
            self._progress, self._first = None, False
        for warning in self.host.warnings:
            note(warning)

    async def unload(self) -> bool:
        """Let go of the model; False where there was none."""
        return await self._only("unloading", self._unload())

    @asynccontextmanager
    async def exclusively(self) -> AsyncIterator[Loaded]:
        """The model, with no engine around it, for work in another thread; it answers again afterwards."""
        loaded = self.host.loaded
        if loaded is None:
            raise refused("overloaded", "No model is loaded.")
        if self.busy:
            raise _busy()
        begun, over = asyncio.Event(), asyncio.Event()
        self._change = "race"
        self._task = asyncio.create_task(self._lend(loaded, begun, over))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            await self._task
        try:
            yield loaded
        finally:
            over.set()
            await asyncio.shield(self._task)

    def cancel(self) -> bool:
        """Ask the load under way to stop; False where there is none that can be."""
        stage = self.host.stage
        if not self.busy or self._change != _LOAD or stage is None or stage.phase in _LATE:
            return False
        self._stop.set()
        return True

    def stop(self) -> None:
        """Ask whatever change is under way to stop: the server is about to end."""
        if self.busy:
            self._stop.set()

    async def settled(self, seconds: float) -> bool:
        """Wait for the change under way; False where it takes longer."""
        if self._task is None:
            return True
        done, _ = await asyncio.wait({self._task}, timeout=seconds)
        return bool(done)

    # how it is done ------------------------------------------------------------------------------

    async def _only(self, what: str, change: Any) -> Any:
        if self.busy:
            change.close()
            raise _busy()
        self._change = what
        self._task = asyncio.create_task(change)
        self._task.add_done_callback(_retrieved)
        return await asyncio.shield(self._task)

    async def _load(self, loading: LoadSettings, settings: ServeSettings) -> None:
        name = str(loading.model or DEFAULT_MODEL)
        self._stop.clear()
        self.failure, self.cancelled = "", False
        named = (loading.model, loading.drafter, loading.draft_model)
        self.names = tuple(str(each) for each in named if each is not None)
        old: Loaded | None = self.host.loaded
        kept = (old.loading, old.settings) if old is not None else None
        try:
            if self.host.model is not None:
                self._step("finding", name)
                tell = self._telling(partial(self._step, "finding", name))
                taken = mx.get_active_memory() if old is None else held_bytes(old.parts)
                await self._run(lambda: examine(loading, tell, released=taken))
                old = None
                await self._release(name, "Another model is being loaded; no request is taken meanwhile.")
            await self._take(name, loading, settings, "loading")
            log_event("loaded", model=name, settings=as_json(loading))
        except Exception as error:
            await self._undo(kept)
            told = self._told(error, name)
            self.failure, self.cancelled = str(told), isinstance(told, LoadCancelled)
            if self._first and isinstance(told, DsparkError):
                raise told from error
            log_event("load failed", WARNING, model=name, error=self.failure)
            raise told from error
        finally:
            self._over()

    async def _undo(self, kept: tuple[LoadSettings, ServeSettings] | None) -> None:
        """The model that was there, loaded again where it had to go."""
        if kept is None or self.host.model is not None:
            return
        self._stop.clear()
        try:
            await self._take(str(kept[0].model or DEFAULT_MODEL), *kept, "restoring")
        except Exception:  # noqa: BLE001
            LOG.exception("The model that was loaded before could not be loaded again.")

    def _told(self, error: Exception, name: str) -> Exception:
        """What whoever asked for the load is told."""
        model = self.host.model
        now = "No model is loaded." if model is None else f"{model.session.name} goes on answering."
        if isinstance(error, DsparkError):
            error.args = (f"{error.without_listings} {now}".strip(),)
            return error
        if isinstance(error, Refused):
            return error
        LOG.error("Loading %s failed: %r", name, error, exc_info=error)
        return Refused(
            Fault("server", f"{brief(name)} could not be loaded; the server's log says why. {now}")
        )

    async def _release(self, name: str, closed: str) -> None:
        """Wait for the answers under way, then let go of the model. Raises LoadCancelled while it waits."""
        host = self.host
        self._step("draining", name, message="waiting for the answers under way")
        host.closed = closed
        seconds = self.started[1].drain_timeout
        await host.drain(seconds, "The model was unloaded before the answer was complete.", self._stop.is_set)
        self._check()
        if host.vitals().state in ("stalled", "dead"):
            raise refused("overloaded", f"The engine cannot be ended. {host.vitals().reason}")
        await self._close()

    async def _close(self) -> None:
        loaded, warnings, model = self.host.loaded, self.host.warnings, self.host.release()
        try:
            if model is not None:
                await asyncio.to_thread(model.close)
        except EngineLost:
            if loaded is not None:
                self.host.take(loaded, warnings)
            raise
        del model, loaded
        gc.collect()

    async def _take(self, name: str, loading: LoadSettings, settings: ServeSettings, phase: Phase) -> None:
        tell = self._telling(partial(self._step, phase, name))
        notes: list[str] = []

        def work() -> Loaded:
            mx.clear_cache()
            bandwidth_here()
            return load_model(loading, settings, tell, notes.append)

        self._step(phase, name)
        loaded: Loaded = await self._run(work)
        if self._stop.is_set():
            await asyncio.to_thread(loaded.model.close)
        self._check()
        self.host.take(loaded, notes)

    async def _unload(self) -> bool:
        if self.host.model is None:
            return False
        self._stop.clear()
        try:
            await self._release(self.host.model.session.name, "The model is being unloaded.")
            await in_mlx_thread(mx.clear_cache)
            log_event("unloaded")
        finally:
            self._over()
        return True

    async def _lend(self, loaded: Loaded, begun: asyncio.Event, over: asyncio.Event) -> None:
        host, name, warnings = self.host, loaded.model.session.name, self.host.warnings
        self._stop.clear()
        try:
            await self._release(name, "The model is busy with a race; no request is taken meanwhile.")
            self._step("racing", name)
            begun.set()
            await over.wait()
            host.take(await in_mlx_thread(loaded.again), warnings)
        finally:
            self._over()

    # how far it has come -------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Any]) -> Any:
        self._check()
        try:
            return await in_mlx_thread(work)
        except _Stop:
            raise self._cancelled() from None

    def _telling(self, step: Callable[..., None]) -> Progress:
        """Takes the progress of the thread that loads to the loop; stops that thread where that is asked."""
        loop = asyncio.get_running_loop()

        def tell(told: LoadProgress) -> None:
            if self._stop.is_set():
                raise _Stop
            if self._progress is not None:
                self._progress(told)
            loop.call_soon_threadsafe(partial(step, told=told))

        return tell

    def _step(self, phase: Phase, name: str, *, message: str = "", told: LoadProgress | None = None) -> None:
        if told is None:
            self.host.at(Stage(phase, name, message))
            return
        if self.host.stage is None:
            return
        phase = phase if phase == "restoring" else _phase_of(told, phase)
        done = (told.fraction, told.bytes_done, told.bytes_total)
        self.host.at(Stage(phase, name, told.message, *done))

    def _over(self) -> None:
        self.host.closed = ""
        self.host.at(None)

    def _check(self) -> None:
        if self._stop.is_set():
            raise self._cancelled()

    def _cancelled(self) -> LoadCancelled:
        kept = "What was fetched is kept." if self._change == _LOAD else ""
        return LoadCancelled(f"The {self._change} was cancelled.", kept)


def refuse_ranks() -> None:
    """Raises Refused where several processes share the model: the others would not follow."""
    if launched_rank() is not None:
        raise refused(
            "invalid_request", "Several processes share the model; start them again to change it.", status=409
        )


def _phase_of(told: LoadProgress, phase: Phase) -> Phase:
    if told.bytes_done or told.bytes_total:
        return "fetching"
    if told.message == "warming up":
        return "warming up"
    return "measuring" if told.message.startswith("measuring") else phase


def _busy() -> Refused:
    return refused(
        "invalid_request",
        "Another change of the model is under way; /admin/status tells how far it is.",
        status=409,
        headers={"retry-after": "5"},
    )


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Whoever waited may be gone; what the task raised is in `failure`."""
    if not task.cancelled():
        task.exception()
