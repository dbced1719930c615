"""The server's log: one JSON object a line on standard error, and no text unless it is asked for."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from mlx_dspark.foundation.serve_settings import Logged

LOG = logging.getLogger("mlx_dspark.serving")
_FIELDS = "dspark_fields"
REQUEST: ContextVar[str] = ContextVar("request", default="")
"""The id of the request that is being answered, empty outside of one."""


def log_event(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log something that happened, with its facts."""
    if REQUEST.get():
        facts = {"request": REQUEST.get()} | facts
    LOG.log(level, "%s", event, extra={_FIELDS: facts})


@contextmanager
def logged(what: Logged, stream: TextIO | None = None) -> Iterator[None]:
    """Write the log while a server runs; a program's own set-up of logging is left alone."""
    if what == "off" or LOG.hasHandlers():
        yield
        return
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Lines())
    before = LOG.level, LOG.propagate
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.level, LOG.propagate = before


class Lines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        told |= getattr(record, _FIELDS, {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=True, default=_plain)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)
