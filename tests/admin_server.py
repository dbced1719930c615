"""A server that takes administration, around whatever is loaded into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.serving.admin.swap import Swap
from mlx_dspark.serving.app import create_app
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.streaming import Clock
from tests.tiny_server import listening

STARTED = (LoadSettings(), ServeSettings(warmup=False, drain_timeout=20.0))


@contextmanager
def admin_server(
    *, rules: Rules | None = None, clock: Clock | None = None, **settings: Any
) -> Iterator[tuple[httpx.Client, Swap]]:
    """A client of it, and what changes its model; nothing is loaded."""
    host = Host(None, clock=clock)
    swap = Swap(host, (STARTED[0], replace(STARTED[1], **settings)))
    with listening(create_app(host, rules, swap)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, swap
    host.close()
    if (model := host.release()) is not None:
        model.close()


def load(client: httpx.Client, model: Path | str, **settings: Any) -> httpx.Response:
    """Ask for a model."""
    return client.post("/admin/load", json={"model": str(model), **settings})


def asked(text: str = "Hello there", **fields: Any) -> dict[str, Any]:
    """A body of a chat completion."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, **fields}


def answered(client: httpx.Client, **fields: Any) -> str:
    """The text of an answer."""
    response = client.post("/v1/chat/completions", json=asked(**fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]
