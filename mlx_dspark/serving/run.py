"""The server as a process: bound, loaded, served, watched, drained."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from mlx_dspark.foundation.errors import EngineLost, UsageError
from mlx_dspark.foundation.knobs import refuse_unknown
from mlx_dspark.foundation.numbers import brief
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.serving.admin.body import KEPT
from mlx_dspark.serving.admin.swap import Swap
from mlx_dspark.serving.app import create_app
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.heads import TimelyProtocol
from mlx_dspark.serving.host import LAST_WORDS, Host
from mlx_dspark.serving.log import LOG, logged
from mlx_dspark.serving.streaming import Clock

if TYPE_CHECKING:
    from mlx_dspark.catalog.progress import Progress

Note = Callable[[str], None]

_HERE = ("127.0.0.1", "::1", "localhost")
_TICK = 0.5
_LOAD_STOPS = 15.0
"""Seconds in which a load that is asked to stop should."""
_IDLE_CONNECTION = 75
_BACKLOG = 2048


def run_server(
    model: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
    ready: Callable[[str], None] | None = None,
    **settings: Any,
) -> None:
    """Serve a model over HTTP until the process is asked to end (SIGINT, SIGTERM). Without a name: the
    default model.

    `settings` are the fields of LoadSettings and ServeSettings, such as `port=8080` or `max_batch=8`;
    `progress` is told what is being fetched, read and measured; `ready` is called with the address, such as
    `http://127.0.0.1:8080`, when requests are taken. What the command writes to standard error, this writes
    too. Raises UsageError, LoadError or DownloadError before anything is served, and EngineLost when the
    engine ends or hangs.
    """
    own = {knob.name for knob in ServeSettings.knobs()}
    refuse_unknown(settings, [*own, *(knob.name for knob in LoadSettings.knobs())])
    serving = ServeSettings.of({name: value for name, value in settings.items() if name in own})
    loading = LoadSettings.of(
        {"model": model, **{name: value for name, value in settings.items() if name not in own}}
    )
    serve(loading, serving, progress=progress, note=_written, ready=ready)


def _written(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(
    loading: LoadSettings,
    settings: ServeSettings,
    *,
    progress: Progress | None = None,
    note: Note = lambda _: None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """As `run_server`; `note` is told what the user should know. The port is taken before the model is
    loaded, and /health tells how far that has come."""
    if settings.no_model:
        _refuse_unused(loading)
    if settings.api_key is None and settings.host not in _HERE:
        note(f"Anyone who reaches {settings.host} may use this server; --api-key asks for a key.")
    with bound(settings.host, settings.port) as listener:
        host = Host(None, clock=clock_of(settings), queue=settings.queue)
        host.logs_prompts = settings.log == "prompts"
        swap = Swap(host, (loading, settings))
        running = Running(host, settings, swap, ready)
        try:
            with logged(settings.log):
                asyncio.run(running.run(listener, note, progress))
        finally:
            host.close()
            model = host.release()
            if model is not None and not running.stuck:
                model.close()
    if running.failure is not None:
        raise running.failure


def _refuse_unused(loading: LoadSettings) -> None:
    """Raises UsageError for what only a model that is loaded at the start would heed; what is switched off is
    off without one."""
    for knob in LoadSettings.knobs():
        value = getattr(loading, knob.name)
        if knob.name not in KEPT and value is not False and value != knob.default:
            raise UsageError(
                f"{knob.name} is {brief(str(value))}, and no_model starts the server with nothing loaded.",
                "Leave one of the two out; /admin/load takes this setting with its model.",
                field=knob.name,
            )


def clock_of(settings: ServeSettings) -> Clock:
    """The time limits of requests."""
    return Clock(
        keep_alive=settings.stream_keepalive_s,
        queue=settings.queue_timeout,
        deadline=settings.request_timeout,
    )


def rules_of(settings: ServeSettings) -> Rules:
    """Who may ask."""
    return Rules(
        settings.api_key, settings.allowed_hosts, settings.origins, int(settings.max_body_mb * 1_000_000)
    )


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket on this address that does not listen yet. Raises UsageError naming the flag."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(
            f"host is {host!r}, which is no address: {error.strerror}.",
            "Give an address of this machine, such as 127.0.0.1 or 0.0.0.0.",
            field="host",
        ) from error
    with socket.socket(family, kind, proto) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise UsageError(
                f"port is {port}, and {host} does not let this program listen there: {error.strerror}.",
                "Stop what listens there, or choose another --port.",
                field="port",
            ) from error
        yield listener


class _Server(uvicorn.Server):
    """One whose signals are somebody else's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Running:
    """A server from its start to its end. `failure` is what ended it, None where it was asked to;
    `stuck`: the thread that calls MLX cannot be waited for."""

    def __init__(
        self,
        host: Host,
        settings: ServeSettings,
        swap: Swap | None = None,
        ready: Callable[[str], None] | None = None,
    ) -> None:
        self._host = host
        self._ready = ready
        self._note: Note = lambda _: None
        self._settings = settings
        self._swap = swap
        self._asked = asyncio.Event()
        self._state = "ok"
        self.failure: Exception | None = None
        self.stuck = False

    async def run(
        self, listener: socket.socket, note: Note = lambda _: None, progress: Progress | None = None
    ) -> None:
        """Serve on a bound socket until asked to end, or until the engine is lost; load the model first."""
        self._loop, self._note = asyncio.get_running_loop(), note
        server = _Server(self._config())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        watching = asyncio.create_task(self._watch())
        asked = asyncio.create_task(self._asked.wait())
        with self._signals():
            if await self._loaded(asked, progress, note):
                note(f"Listening on {address_of(listener)}")
                if self._ready is not None:
                    self._ready(address_of(listener))
                await asyncio.wait({serving, watching, asked}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
            server.should_exit = True
            await serving
        for task in (watching, asked):
            task.cancel()
        await asyncio.gather(watching, asked, return_exceptions=True)

    async def _loaded(self, asked: asyncio.Task[Any], progress: Progress | None, note: Note) -> bool:
        """Load the model that the server was started with; False where that failed or was stopped."""
        if self._swap is None or self._settings.no_model:
            return True
        first = asyncio.create_task(self._swap.load_first(progress, note))
        await asyncio.wait({first, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            return False
        error = first.exception()
        self.failure = error if isinstance(error, Exception) else None
        return error is None

    def ask_to_end(self) -> None:
        """Ask it to end, from any thread; when it was asked already, no more answers are waited for."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._asked.is_set():
            self._host.fail_all(_ENDING)
        elif busy := self._host.under_way:
            answers = "one answer" if busy == 1 else f"{busy} answers"
            self._note(
                f"Waiting up to {self._settings.drain_timeout:g} s for {answers} under way; "
                "Ctrl-C again ends at once."
            )
        self._asked.set()

    def _config(self) -> uvicorn.Config:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        return uvicorn.Config(
            create_app(self._host, rules_of(self._settings), self._swap),
            http=TimelyProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_CONNECTION,
            timeout_graceful_shutdown=int(LAST_WORDS),
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Both signals ask for an end, where this thread may say so."""
        loop, taken = asyncio.get_running_loop(), []
        with suppress(NotImplementedError, RuntimeError, ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._end)
                taken.append(number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    async def _watch(self) -> None:
        """Until the engine is lost; those who wait are told."""
        while self.failure is None:
            await asyncio.sleep(_TICK)
            vitals = self._host.vitals()
            lost = vitals.state in ("dead", "stalled")
            if vitals.state != self._state and (lost or self._state == "stalled"):
                LOG.warning("The engine is %s. %s", vitals.state, vitals.reason)
            self._state = vitals.state
            if vitals.state == "dead" or self._host.lost(self._settings.stall_timeout):
                self.stuck = vitals.state != "dead"
                self.failure = EngineLost(vitals.reason, "Start the server again; its log may say more.")
        self._host.fail_all(str(self.failure))

    async def _drain(self) -> None:
        """Take no more, and wait for those who still get their answers."""
        self._host.ending = True
        if self._swap is not None and self._swap.busy:
            self._swap.stop()
            self.stuck = not await self._swap.settled(_LOAD_STOPS)
            if self.stuck and self.failure is None:
                self.failure = EngineLost("The load under way could not be stopped.")
        if self.failure is None:
            self._host.fail_all(_ENDING, waiting=True)
            await self._host.until_idle(self._settings.drain_timeout)
        self._host.fail_all(_ENDING if self.failure is None else str(self.failure))
        await self._host.until_idle(LAST_WORDS)


_ENDING = "The server is about to end."


def address_of(listener: socket.socket) -> str:
    """The address of a bound socket as a client would write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
