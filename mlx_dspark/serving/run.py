"""The server as a process: bound, loaded, served, watched, drained."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from mlx_dspark.foundation.errors import EngineLost, UsageError
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.serving.app import create_app
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.host import LOG, Host
from mlx_dspark.serving.loading import load_model
from mlx_dspark.serving.streaming import Clock

if TYPE_CHECKING:
    from mlx_dspark.catalog.progress import Progress

Note = Callable[[str], None]

_TICK = 0.5
_LAST_WORDS = 3.0
"""Seconds in which the last responses may be written."""
_IDLE_CONNECTION = 75
_BACKLOG = 2048


def run_server(
    model: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **settings: Any
) -> None:
    """Serve a model over HTTP until the process is asked to end (SIGINT, SIGTERM). Without a name: the
    default model.

    `settings` are the fields of LoadSettings and ServeSettings, such as `port=8080` or `max_batch=8`;
    `progress` is told what is being fetched, read and measured. Raises UsageError, LoadError or DownloadError
    before anything is served, and EngineLost when the engine ends or hangs.
    """
    own = {knob.name for knob in ServeSettings.knobs()}
    serving = ServeSettings.of({name: value for name, value in settings.items() if name in own})
    loading = LoadSettings.of(
        {"model": model, **{name: value for name, value in settings.items() if name not in own}}
    )
    serve(loading, serving, progress=progress)


def serve(
    loading: LoadSettings,
    settings: ServeSettings,
    *,
    progress: Progress | None = None,
    note: Note = lambda _: None,
) -> None:
    """As `run_server`; `note` is told what the user should know. The port is taken before the model is
    loaded."""
    with bound(settings.host, settings.port) as listener:
        loaded = load_model(loading, settings, progress, note)
        host = Host(loaded.model, loaded.defaults, clock=clock_of(settings), queue=settings.queue)
        running = Running(host, settings)
        try:
            asyncio.run(running.run(listener, note))
        finally:
            host.close()
            if not running.stuck:
                loaded.model.close()
    if running.fatal:
        raise EngineLost(running.fatal, "Start the server again; its log may say more.")


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
    """A server from its start to its end. `fatal` says why it had to end, empty where it was asked to;
    `stuck`: the engine's thread cannot be waited for."""

    def __init__(self, host: Host, settings: ServeSettings) -> None:
        self._host = host
        self._settings = settings
        self._asked = asyncio.Event()
        self._state = "ok"
        self.fatal = ""
        self.stuck = False

    async def run(self, listener: socket.socket, note: Note = lambda _: None) -> None:
        """Serve on a bound socket until asked to end, or until the engine is lost."""
        self._loop = asyncio.get_running_loop()
        server = _Server(self._config())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        watching = asyncio.create_task(self._watch())
        asked = asyncio.create_task(self._asked.wait())
        with self._signals():
            note(f"Listening on {address_of(listener)}")
            await asyncio.wait({serving, watching, asked}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
            server.should_exit = True
            await serving
        for task in (watching, asked):
            task.cancel()
        await asyncio.gather(watching, asked, return_exceptions=True)

    def ask_to_end(self) -> None:
        """Ask it to end, from any thread; when it was asked already, no more answers are waited for."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._asked.is_set():
            self._host.fail_all(_ENDING)
        self._asked.set()

    def _config(self) -> uvicorn.Config:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        return uvicorn.Config(
            create_app(self._host, rules_of(self._settings)),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_CONNECTION,
            timeout_graceful_shutdown=int(_LAST_WORDS),
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
        while not self.fatal:
            await asyncio.sleep(_TICK)
            vitals = self._host.vitals()
            if vitals.state not in (self._state, "ending"):
                LOG.warning("The engine is %s. %s", vitals.state, vitals.reason)
                self._state = vitals.state
            if vitals.state == "dead" or vitals.silent > self._settings.stall_timeout:
                self.fatal, self.stuck = vitals.reason, vitals.state != "dead"
        self._host.fail_all(self.fatal)

    async def _drain(self) -> None:
        """Take no more, and wait for those who still get their answers."""
        self._host.ending = True
        if not self.fatal:
            await self._until_idle(self._settings.drain_timeout)
        self._host.fail_all(self.fatal or _ENDING)
        await self._until_idle(_LAST_WORDS)

    async def _until_idle(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._host.idle:
                    await asyncio.sleep(_TICK / 10)


_ENDING = "The server is about to end."


def address_of(listener: socket.socket) -> str:
    """The address of a bound socket as a client would write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
