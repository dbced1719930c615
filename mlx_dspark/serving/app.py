"""The application: a route for each dialect, and the one place where errors become responses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlx_dspark._version import __version__
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.serving.dialects import DIALECTS, dialect_of
from mlx_dspark.serving.dialects.base import Dialect, json_bytes
from mlx_dspark.serving.faults import Fault, FaultKind, Refused, fault_of
from mlx_dspark.serving.host import Host


def create_app(host: Host) -> FastAPI:
    """The server's application around a host."""
    app = FastAPI(title="mlx-dspark", version=__version__, docs_url=None, redoc_url=None)
    app.state.host = host
    for dialect in DIALECTS:
        _add(app, host, dialect)
    for kind in (DsparkError, Refused, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _failed)
    return app


def _add(app: FastAPI, host: Host, dialect: Dialect) -> None:
    async def answer(body: Any) -> Response:
        return await host.answer(dialect, body)

    answer.__annotations__ = {"body": dialect.body, "return": Response}
    for path in dialect.paths:
        name = path.strip("/").replace("/", "_").replace(".", "_")
        app.add_api_route(path, answer, methods=["POST"], name=name, response_model=None)


async def _failed(request: Request, error: Exception) -> Response:
    fault = _fault(error)
    body = dialect_of(request.url.path).error(fault)
    return Response(json_bytes(body), fault.code, dict(fault.headers), media_type="application/json")


def _fault(error: Exception) -> Fault:
    if isinstance(error, RequestValidationError):
        return invalid_body(error)
    if isinstance(error, HTTPException):
        kind = _KINDS.get(error.status_code, "invalid_request")
        return Fault(kind, str(error.detail), status=error.status_code, headers=error.headers or {})
    return fault_of(error)


_KINDS: dict[int, FaultKind] = {404: "not_found", 413: "too_large", 503: "overloaded"}


def invalid_body(error: RequestValidationError) -> Fault:
    """A body that is not what the route takes, by its first mistake."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return Fault("invalid_request", f"The body is not JSON: {first.get('ctx', {}).get('error', '')}.")
    path = ".".join(where)
    return Fault("invalid_request", f"{path or 'The body'}: {first['msg']}.", where[0] if where else None)
