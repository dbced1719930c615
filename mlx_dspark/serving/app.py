"""The application: the routes, and the one place where errors become responses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlx_dspark._version import __version__
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.serving.admin.routes import add_admin
from mlx_dspark.serving.admin.swap import Swap
from mlx_dspark.serving.bodies import BodyRoute, fault_of_field
from mlx_dspark.serving.dialects import DIALECTS, dialect_of
from mlx_dspark.serving.dialects.base import Dialect, json_bytes
from mlx_dspark.serving.faults import Fault, FaultKind, Refused, fault_of
from mlx_dspark.serving.guard import LONGEST_PATH, Guard, Rules, has_key
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.log import LOG, log_event
from mlx_dspark.serving.models import add_models
from mlx_dspark.serving.observe.routes import add_observation

_KINDS: Mapping[int, FaultKind] = MappingProxyType({404: "not_found", 413: "too_large", 503: "overloaded"})
_ERRORS: Mapping[int | str, dict[str, Any]] = MappingProxyType(
    {
        400: {"description": "A field is at fault, and named."},
        401: {"description": "The key is missing or wrong."},
        403: {"description": "A foreign host or page asks."},
        408: {"description": "The body did not arrive in time."},
        413: {"description": "The body is too large."},
        415: {"description": "The body is not JSON, or is compressed."},
        429: {"description": "The queue is full; Retry-After says when to come again."},
        503: {"description": "No model is loaded, or it does not deliver."},
        504: {"description": "The answer was not complete in time."},
        529: {"description": "503 in Anthropic's words."},
    }
)
_ANSWERED: Mapping[int | str, dict[str, Any]] = MappingProxyType(
    {200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer."}}
)

_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def create_app(host: Host, rules: Rules | None = None, swap: Swap | None = None) -> FastAPI:
    """The server's application around a host; with a swap it takes administration too."""
    rules = rules or Rules()
    app = FastAPI(
        title="mlx-dspark", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.host = host
    for dialect in DIALECTS:
        add_dialect(app, host, dialect)
    add_models(app, host)
    add_observation(app, host)
    if swap is not None:
        add_admin(app, swap)
    _add_health(app, host, rules)
    for kind in (DsparkError, Refused, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _failed)
    app.add_middleware(Guard, rules=rules)
    _tell_of_keys(app)
    return app


def _tell_of_keys(app: FastAPI) -> None:
    """Let the page of the routes say how a key is sent, where the server asks for one."""
    plain = app.openapi

    def page() -> dict[str, Any]:
        told = plain()
        told["components"]["securitySchemes"] = _KEYS
        told["security"] = [{}, *({name: []} for name in _KEYS)]
        return told

    app.openapi = page


def add_dialect(app: FastAPI, host: Host, dialect: Dialect) -> None:
    """A dialect's routes."""

    async def answer(body: Any) -> Response:
        return await host.answer(dialect, body)

    async def count(body: Any) -> Response:
        tokens = dialect.counted(await host.count(dialect, body))
        return Response(json_bytes(tokens), media_type="application/json")

    answer.__doc__ = dialect.__doc__
    count.__doc__ = "The tokens that the prompt of such a body has."
    for route, paths, more in ((answer, dialect.paths, _ANSWERED), (count, dialect.counting, {})):
        route.__annotations__ = {"body": dialect.body, "return": Response}
        for path in paths:
            name = path.strip("/").replace("/", "_")
            app.router.add_api_route(
                path,
                route,
                methods=["POST"],
                name=name,
                response_model=None,
                responses={**_ERRORS, **more},
                route_class_override=BodyRoute,
            )


def _add_health(app: FastAPI, host: Host, rules: Rules) -> None:
    async def health(request: Request) -> Response:
        """Whether the server answers: 200, or 503 with the reason."""
        private = rules.api_key is None or has_key(request.scope, rules.api_key)
        status = 200 if host.vitals().well else 503
        return Response(json_bytes(host.health(private=private)), status, media_type="application/json")

    async def root() -> Response:
        """That this is a server."""
        return Response(json_bytes({"name": "mlx-dspark"}), media_type="application/json")

    for path, route in (("/health", health), ("/", root)):
        app.add_api_route(path, route, response_model=None, name=route.__name__)


async def _failed(request: Request, error: Exception) -> Response:
    fault = _fault(error, request)
    if fault.kind == "server":
        LOG.error("%s %s failed: %r", request.method, request.url.path, error, exc_info=error)
    dialect = dialect_of(request.url.path, request.headers.get("anthropic-version"))
    body, status = json_bytes(dialect.error(fault)), dialect.status(fault)
    log_event(
        "refused",
        method=request.method,
        path=request.url.path[:LONGEST_PATH],
        status=status,
        field=fault.field,
    )
    return Response(body, status, dict(fault.headers), media_type="application/json")


def _fault(error: Exception, request: Request) -> Fault:
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        kind = _KINDS.get(error.status_code, "invalid_request")
        told = _routed(error, request) or str(error.detail)
        return Fault(kind, told, status=error.status_code, headers=error.headers or {})
    return fault_of(error)


def _routed(error: HTTPException, request: Request) -> str:
    """What is told where no route is the one that was asked for, or its body cannot be read; empty for other
    errors."""
    path = request.url.path[:LONGEST_PATH]
    if error.status_code == 404:
        taken = ", ".join(dict.fromkeys(each.paths[0] for each in DIALECTS))
        return f"There is no route {path}. Answers are at {taken}; GET /openapi.json lists the others."
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{path} does not take {request.method}. Use {allowed}."
    if error.status_code == 400:
        return "The body cannot be read. Send a JSON object in UTF-8."
    return ""


def _invalid(error: RequestValidationError) -> Fault:
    """A body or a query that is not what the route takes, by its first mistake."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Fault("invalid_request", f"The body is not JSON: {first.get('ctx', {}).get('error', '')}.")
    if first["loc"][0] == "query":
        return fault_of_field(first | {"loc": first["loc"][1:]}, {first["loc"][-1]: None})
    return fault_of_field(first | {"loc": first["loc"][1:]}, error.body)
