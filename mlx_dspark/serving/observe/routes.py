"""The routes that show what the server does: nothing here changes anything."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from mlx_dspark.serving.admin.threads import in_mlx_thread
from mlx_dspark.serving.dialects.base import Frame, json_bytes
from mlx_dspark.serving.guard import HEAD
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.observe.board import KEPT_ROUNDS
from mlx_dspark.serving.observe.machine import calibration_json, machine_json
from mlx_dspark.serving.observe.metrics import metrics_json, metrics_text, wants_json
from mlx_dspark.serving.observe.sse import frames_of, sse


def add_observation(app: FastAPI, host: Host) -> None:
    """The routes."""
    measuring = asyncio.Lock()

    async def metrics(request: Request) -> Response:
        """Figures since the server was started: Prometheus' text, or JSON where Accept prefers that."""
        vary = {"vary": "Accept"}
        if wants_json(request.headers.get("accept", "")):
            return Response(json_bytes(metrics_json(host)), media_type="application/json", headers=vary)
        return Response(metrics_text(host), media_type=CONTENT_TYPE_PLAIN_0_0_4, headers=vary)

    async def events(request: Request) -> Response:
        """Server-sent events: began, prefill, first, round, answer, load, dropped, and stats in silence."""
        if HEAD in request.scope:
            return Response(media_type="text/event-stream")

        def idle() -> Frame:
            return Frame(metrics_json(host), "stats")

        quiet = host.clock.keep_alive
        return sse(frames_of(host.board.bus, idle, quiet=quiet, ended=lambda: host.ending))

    async def rounds(limit: Annotated[int, Query(ge=1, le=KEPT_ROUNDS)] = 128) -> Response:
        """The newest rounds that added to answers, oldest first."""
        return _json({"rounds": list(host.board.newest)[-limit:], "kept": KEPT_ROUNDS})

    async def calibration() -> Response:
        """What is known of the costs of rounds on this machine."""
        return _json(calibration_json(None if host.model is None else host.model.session))

    async def machine() -> Response:
        """The machine, its measured bandwidth, and how the model stands to what that allows."""
        async with measuring:
            return _json(await in_mlx_thread(lambda: machine_json(host, host.loaded)))

    async def doctor() -> Response:
        """The checks of `mlx-dspark doctor`, of this process."""
        from mlx_dspark.doctor.machine import machine_checks

        async with measuring:
            checks = await in_mlx_thread(machine_checks)
        return _json({"ok": all(check.well for check in checks), "checks": [c.as_dict() for c in checks]})

    app.add_api_route(
        "/metrics",
        metrics,
        response_model=None,
        response_class=PlainTextResponse,
        responses={200: {"content": {"application/json": {}}}},
        name="metrics",
    )
    for route in (rounds, calibration, machine, doctor):
        app.add_api_route(f"/{route.__name__}", route, response_model=None, name=route.__name__)
    app.add_api_route(
        "/events",
        events,
        response_model=None,
        responses={200: {"content": {"text/event-stream": {}}}},
        name="events",
    )


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")
