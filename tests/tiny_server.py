"""The real server on a free port, around the real engine and a tiny random model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.serving.app import create_app
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.model import Model
from mlx_dspark.session.session import Session
from mlx_dspark.targets.load import target_of
from tests.tiny import EOS_IDS, tiny_config, tiny_llama, tiny_tokenizer


def tiny_session(*, rows: int = 4, drafter: Any = None, stops: bool = False) -> Session:
    """A session around a tiny random Llama of 512 tokens of context."""
    target = target_of(tiny_llama(seed=2, stops=stops), tiny_config("llama"), context=512)
    scheduler = Scheduler(target, drafter, max_rows=rows)
    return Session(scheduler, tiny_tokenizer(), end_ids=EOS_IDS, mode="baseline", name="tiny", context=512)


@contextmanager
def listening(app: Any, http: Any = "auto") -> Iterator[str]:
    """Run an application on a free port, by a protocol of uvicorn's; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def tiny_host(session: Session | None = None, **options: Any) -> Iterator[Host]:
    """A host around a session, or around `tiny_session`."""
    with session or tiny_session() as session:
        host = Host(Model(session), **options)
        try:
            yield host
        finally:
            host.close()


@contextmanager
def tiny_server(
    session: Session | None = None, rules: Rules | None = None, *, http: Any = "auto", **options: Any
) -> Iterator[str]:
    """A server around `tiny_host`."""
    with tiny_host(session, **options) as host, listening(create_app(host, rules), http) as url:
        yield url
