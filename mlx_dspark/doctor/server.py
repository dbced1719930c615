"""Whether a server answers, and what it says of itself."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from mlx_dspark.doctor.check import FAIL, OK, OPEN, WARN, Check

_SECONDS = 5.0


def server(url: str, api_key: str | None = None, *, expected: bool = False) -> list[Check]:
    """Ask a server how it is; `expected`: that none answers is a failure."""
    try:
        status, body = _asked(url, "/health", api_key)
    except (OSError, http.client.HTTPException, ValueError) as error:
        found = f"No server answers at {url}: {getattr(error, 'strerror', None) or error}."
        return [Check("server", FAIL if expected else OPEN, found, "Start one with mlx-dspark serve.")]
    if not isinstance(body.get("status"), str):
        found = f"What answers at {url} is no server of mlx-dspark."
        fix = "Name one with --url, or start one: mlx-dspark serve."
        return [Check("server", FAIL if expected else WARN, found, fix)]
    if status == 200:
        return [Check("server", OK, f"{url}: {body.get('model') or 'it answers'}"), *_key(url, api_key)]
    reason = body.get("reason") or f"status {status}"
    return [Check("server", WARN, f"{url}: {reason}", _fix(body.get("status")))]


def _fix(state: Any) -> str:
    return {
        "no model": "Load one: POST /admin/load.",
        "loading": "Wait; /health tells how far it is.",
        "draining": "Wait; the model is being changed.",
        "racing": "Wait; a race has the model.",
        "stalled": "Its log may say more; start it again.",
    }.get(state, "See whether something else listens there.")


def _key(url: str, api_key: str | None) -> list[Check]:
    """Whether the key is taken where one is asked for."""
    status, _ = _asked(url, "/v1/models", api_key)
    if status != 401:
        return []
    found = "The server asks for a key" if api_key is None else "The server does not take this key"
    return [Check("key", WARN, f"{found}.", "Give the one that it was started with: --api-key.")]


def _asked(url: str, path: str, api_key: str | None) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=_SECONDS)
    try:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
        raw = response.read(1 << 20)
    finally:
        connection.close()
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    return response.status, body if isinstance(body, dict) else {}
