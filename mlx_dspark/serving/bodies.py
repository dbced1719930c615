"""From the bytes of a body to a checked one, off the event loop where they are many, and what is told of a
body that is not what its route takes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from time import monotonic
from types import MappingProxyType
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from mlx_dspark.serving.dialects.fields import shown
from mlx_dspark.serving.faults import Fault, Refused, refused
from mlx_dspark.serving.streaming import ARRIVED, ClientGone, until_gone

MOST_CONTAINERS = 50_000
"""Lists and objects of a body: what reading more of them costs, everybody else's answer would wait for."""
_AT_ONCE = 32_000
"""Bytes that are read and checked in less time than another thread takes to begin."""
_STRING_OR_OPENER = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]', re.DOTALL)
_QUOTE = ord('"')
_NOBODY = 499
_WANTED: Mapping[str, str] = MappingProxyType(
    {
        "string_type": "text",
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
        "string_too_short": "at least one character",
    }
)


class BodyRoute(APIRoute):
    """A route that takes `body`: a model that the endpoint's annotations name.

    A client that leaves before there is a response ends the work for it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind: type[BaseModel] = self.endpoint.__annotations__["body"]

        async def answer(request: Request) -> Response:
            raw = await request.body()
            few = len(raw) <= _AT_ONCE
            body = checked(kind, raw) if few else await asyncio.to_thread(checked, kind, raw)
            return await self.endpoint(body)

        async def handle(request: Request) -> Response:
            ARRIVED.set(monotonic())
            try:
                return await until_gone(request.receive, answer(request))
            except ClientGone:
                return Response(status_code=_NOBODY)

        return handle


def checked(kind: type[BaseModel], raw: bytes) -> BaseModel:
    """The body that bytes stand for. Raises Refused, naming the field where one is at fault."""
    value = _parsed(raw)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refused(fault_of_field(first, value)) from error


def _parsed(raw: bytes) -> Any:
    if not raw.strip():
        raise refused("invalid_request", "The body is empty. Send a JSON object.")
    if _too_many_containers(raw):
        raise refused(
            "invalid_request",
            f"The body holds more than {MOST_CONTAINERS} lists and objects. Send fewer messages and parts.",
        )
    try:
        return json.loads(raw)
    except UnicodeDecodeError:
        raise refused("invalid_request", "The body is not valid UTF-8. Send JSON as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise refused("invalid_request", f"The body is not JSON: {error}. Send a JSON object.") from None
    except (ValueError, RecursionError):
        raise refused(
            "invalid_request",
            "The body cannot be read: it is nested too deeply, or a number has too many digits.",
        ) from None


def _too_many_containers(raw: bytes) -> bool:
    """Whether there are more than MOST_CONTAINERS outside of strings. Lets other threads have their turns."""
    if raw.count(b"[") + raw.count(b"{") <= MOST_CONTAINERS:
        return False
    left = MOST_CONTAINERS
    for found in _STRING_OR_OPENER.finditer(raw):
        left -= raw[found.start()] != _QUOTE
        if left < 0:
            return True
    return False


def fault_of_field(error: Mapping[str, Any], body: Any) -> Fault:
    """What is told of a pydantic error in a body: the field as a path such as `messages[0].content`, what it
    is, and what to give."""
    steps = _steps(error["loc"], body, missing=error["type"] == "missing")
    field = steps[0] if steps and isinstance(steps[0], str) else None
    return Fault("invalid_request", _told(error, _path(steps) or "The body"), field)


def _told(error: Mapping[str, Any], name: str) -> str:
    kind, context, given = error["type"], error.get("ctx", {}), shown(error["input"])
    match kind:
        case "missing":
            return f"{name} is missing. Give it."
        case "too_short":
            return f"{name} is empty. Give at least {context['min_length']}."
        case "too_long":
            return f"{name} has too many items. Give up to {context['max_length']}."
        case "greater_than_equal":
            return f"{name} is {given}, which cannot be used. Give {context['ge']} or more."
        case "less_than_equal":
            return f"{name} is {given}, which cannot be used. Give {context['le']} or less."
        case "literal_error":
            return f"{name} is {given}, which cannot be used. Give {_words(context['expected'])}."
        case "value_error" | "text_or_list" | "prompt":
            return (
                f"{name} is {given}, which cannot be used. Give {error['msg'].removeprefix('Value error, ')}."
            )
        case _ if kind in _WANTED:
            return f"{name} is {given}, which cannot be used. Give {_WANTED[kind]}."
        case _:
            return f"{name} is {given}, which cannot be used: {error['msg'].rstrip('.')}."


def _words(expected: str) -> str:
    """The choices as pydantic lists them, in the quotes of JSON."""
    return expected.replace("'", '"')


def _steps(where: Sequence[Any], body: Any, *, missing: bool) -> list[Any]:
    """The parts of a location that lead into the body, and the last one where that is missing there; other
    parts name what a value was tried as."""
    steps: list[Any] = []
    for part in where[: len(where) - missing]:
        here = isinstance(body, Mapping) and part in body
        if here or (isinstance(body, list) and isinstance(part, int) and part < len(body)):
            body = body[part]
            steps.append(part)
    return [*steps, *where[len(where) - missing :]]


def _path(steps: Sequence[Any]) -> str:
    path = ""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            name = step if len(step) <= 64 else step[:64] + "…"
            path += f".{name}" if path else name
    return path
