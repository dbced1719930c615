"""The routes that change the server. Each takes a JSON body, and the guard has let nobody in who may not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from mlx_dspark.foundation.errors import (
    DownloadError,
    DsparkError,
    EngineLost,
    LoadCancelled,
    ModelNotFound,
    UsageError,
)
from mlx_dspark.foundation.settings import DEFAULT_MODEL
from mlx_dspark.serving.admin.body import (
    CancelBody,
    LoadBody,
    NoBody,
    RaceBody,
    arms_of,
    as_json,
    refuse_unknown,
    settings_of,
)
from mlx_dspark.serving.admin.race import check_arms, check_prompt, race
from mlx_dspark.serving.admin.swap import Swap, refuse_ranks
from mlx_dspark.serving.admin.threads import in_mlx_thread
from mlx_dspark.serving.dialects.base import json_bytes
from mlx_dspark.serving.faults import STATUS, Refused, refused
from mlx_dspark.serving.observe.sse import sse

_STATUS: Mapping[type[DsparkError], int] = MappingProxyType(
    {ModelNotFound: 404, DownloadError: 502, LoadCancelled: 409, UsageError: 400, EngineLost: 503}
)
_UNFIT = 422
_STOPS = 10.0
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is at fault, and named."},
    401: {"description": "The key is missing or wrong."},
    403: {"description": "A foreign host or page asks."},
    404: {"description": "There is no such model."},
    409: {"description": "Another change is under way, or the load was cancelled."},
    415: {"description": "The body is not JSON."},
    422: {"description": "The model or drafter cannot be loaded; the one before answers as it did."},
    502: {"description": "The hub cannot be reached."},
    503: {"description": "No model is loaded, or it does not deliver."},
}


def add_admin(app: FastAPI, swap: Swap) -> None:
    """The routes."""
    _add_changes(app, swap)
    _add_views(app, swap)


def _add_changes(app: FastAPI, swap: Swap) -> None:
    async def load(body: Any) -> Response:
        """Load a model in the place of the present one; answers when it is ready.

        Settings that are not named are as declared, and a few as the server was started: docs/serving.md.
        """
        refuse_ranks()
        loading, settings = settings_of(body, swap.started)
        try:
            await swap.load(loading, settings)
        except DsparkError as error:
            raise _refusal(error) from error
        return _json(status_of(swap))

    async def cancel(body: CancelBody) -> Response:
        """Stop the load under way. What was fetched is kept for the next, unless `cleanup` is true."""
        refuse_unknown(body)
        names = swap.names
        stopping = swap.cancel()
        stopped = stopping and await swap.settled(_STOPS)
        stopping = swap.cancelled if stopped else stopping
        removed = await in_mlx_thread(lambda: _cleaned(names)) if stopped and body.cleanup else 0
        return _json({"cancelled": stopping, "removed_bytes": removed} | status_of(swap))

    async def unload(body: NoBody) -> Response:
        """Let go of the model when the answers under way are complete; the server stays."""
        refuse_unknown(body)
        refuse_ranks()
        try:
            return _json({"unloaded": await swap.unload()} | status_of(swap))
        except DsparkError as error:
            raise _refusal(error) from error

    async def compete(body: RaceBody) -> Response:
        """Ways to draft side by side on one prompt, as server-sent events."""
        arms = arms_of(body)
        refuse_ranks()
        swap.host.ready()
        if swap.host.loaded is None:
            raise refused("overloaded", "No model is loaded that a race could use.")
        check_arms(swap.host.loaded.parts, arms)
        await check_prompt(swap, swap.host.loaded, body)
        return sse(race(swap, body))

    load.__annotations__ = {"body": LoadBody, "return": Response}
    routes: dict[str, Callable[..., Any]] = {
        "load": load,
        "load/cancel": cancel,
        "unload": unload,
        "race": compete,
    }
    for path, route in routes.items():
        name = f"admin_{path.replace('/', '_')}"
        app.add_api_route(
            f"/admin/{path}", route, methods=["POST"], name=name, response_model=None, responses=_ERRORS
        )


def _add_views(app: FastAPI, swap: Swap) -> None:
    async def status() -> Response:
        """What is loaded, with which settings, and how far a change has come."""
        return _json(status_of(swap))

    async def models() -> Response:
        """The models that drafters are known for and those on this machine, and whether they fit."""
        loaded = swap.host.model
        name = None if loaded is None else loaded.session.name
        return _json(await in_mlx_thread(lambda: models_json(name)))

    for route in (status, models):
        app.add_api_route(
            f"/admin/{route.__name__}", route, name=f"admin_{route.__name__}", response_model=None
        )


def status_of(swap: Swap) -> dict[str, Any]:
    """What `/admin/status` tells."""
    host, loaded = swap.host, swap.host.loaded
    model, stage = host.model, host.stage
    return {
        "ready": host.vitals().well and not host.closed,
        "loading": stage is not None,
        "model": None if model is None else model.session.name,
        "mode": None if model is None else model.session.mode,
        "context_window": None if model is None else model.context or None,
        "settings": None if loaded is None else as_json(loaded.loading),
        "pairing": (model.session.pairing or None) if model is not None else None,
        "warnings": list(host.warnings),
        "error": swap.failure or None,
        "stage": None if stage is None else stage.as_dict(),
        "phase": None if stage is None else stage.phase,
        "download": None if stage is None else stage.as_dict()["download"],
    }


def models_json(loaded: str | None) -> dict[str, Any]:
    """What `/admin/models` tells. Calls MLX, in the thread that asks."""
    from mlx_dspark.calibration.bandwidth import bandwidth_here
    from mlx_dspark.catalog.memory import memory_here
    from mlx_dspark.catalog.pairs import load_registry
    from mlx_dspark.catalog.places import places
    from mlx_dspark.foundation.paths import default_cache_dir
    from mlx_dspark.session.shelf import known, on_this_machine

    have, cache_dir = memory_here(), default_cache_dir()
    registered = [each.as_dict() for each in known(load_registry().pairs, cache_dir, have)]
    local = [each.as_dict() for each in on_this_machine(cache_dir, have)]
    for each in (*registered, *local):
        each["loaded"] = each["name"] == loaded
    return {
        "registered": registered,
        "local": local,
        "default": DEFAULT_MODEL,
        "folders": [{"kind": place.kind, "path": str(place.folder)} for place in places()],
        "memory_bytes": None if have is None else have.bytes,
        "bandwidth_gb_s": round(bandwidth_here().rate / 1e9, 2),
    }


def _refusal(error: DsparkError) -> Refused:
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), _UNFIT)
    kind = "overloaded" if status == STATUS["overloaded"] else "invalid_request"
    return refused(kind, str(error), field=error.field, status=status)


def _cleaned(names: tuple[str, ...]) -> int:
    from mlx_dspark.catalog.downloads import drop_partial

    return sum(map(drop_partial, names))


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")
