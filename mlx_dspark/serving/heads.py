"""Connections on which the head of a request does not arrive are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 30.0
_Protocol: Any = AutoHTTPProtocol


class TimelyProtocol(_Protocol):
    """uvicorn's protocol, which itself waits for ever for the rest of a head that has begun, and for the
    first one."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._arm()
        else:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._late)

    def _disarm(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def _late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
