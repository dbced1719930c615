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
from mlx_dspark.serving.ask import Defaults
from mlx_dspark.serving.generate import Model
from mlx_dspark.serving.host import Host
from mlx_dspark.session.session import Session
from mlx_dspark.targets.load import target_of
from tests.tiny import EOS_IDS, tiny_config, tiny_llama, tiny_tokenizer


def tiny_session(*, rows: int = 4, drafter: Any = None, stops: bool = False) -> Session:
    """A session around a tiny random Llama of 512 tokens of context."""
    target = target_of(tiny_llama(seed=2, stops=stops), tiny_config("llama"), context=512)
    scheduler = Scheduler(target, drafter, max_rows=rows)
    return Session(scheduler, tiny_tokenizer(), end_ids=EOS_IDS, mode="baseline", name="tiny", context=512)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Run an application on a free port; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def tiny_server(**options: Any) -> Iterator[str]:
    """A server around `tiny_session`."""
    with tiny_session(**options) as session, serving(create_app(Host(Model(session), Defaults()))) as url:
        yield url
