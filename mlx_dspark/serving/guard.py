"""What is refused before a route is looked at: foreign hosts and pages, missing keys, bodies that are no
JSON, too large or too slow."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from mlx_dspark.serving.dialects import dialect_of
from mlx_dspark.serving.faults import Fault, Refused, fault_of, refused
from mlx_dspark.serving.log import REQUEST, log_event
from mlx_dspark.serving.streaming import Receive, Send, send_json

OPEN = frozenset({("GET", "/health"), ("HEAD", "/health")})
"""What is answered without a key."""
LONGEST_PATH = 128
"""Characters of a path that are told back."""
_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEAD = "mlx_dspark.head"
"""In the scope of a request whose body would not be sent."""
_PREFLIGHT_SECONDS = "600"
_BODY_SECONDS = 60.0
_DISCARDED = 4
"""A body that is too large is read up to this multiple of the limit, so that its sender hears the answer."""


@dataclass(frozen=True)
class Rules:
    """Who may ask. Without a key, everyone on this machine may. `body_limit` is in bytes."""

    api_key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    body_limit: int = 8_000_000
    body_seconds: float = _BODY_SECONDS


class Headers:
    """The headers of a request; asking for one that came twice gives None, as for one that did not come."""

    def __init__(self, scope: Any) -> None:
        self._pairs = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name.encode()]

    def one(self, name: str) -> str | None:
        found = self.all(name)
        return found[0] if len(found) == 1 else None


class Guard:
    """ASGI middleware around the application. To that, HEAD is GET, whose body no server sends."""

    def __init__(self, app: Any, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/") or "/"
        headers = Headers(scope)
        send = _identified(send, headers)
        try:
            origin = self._page(headers, hostless=scope.get("http_version") == "1.0")
        except Refused as error:
            await _answer(send, scope, fault_of(error))
            return
        send = _with_cors(send, origin) if origin else send
        if origin and scope["method"] == "OPTIONS":
            await _preflight(headers, send)
            return
        try:
            self._key(scope["method"], path, headers)
            receive = await self._body(scope, headers, receive)
        except Refused as error:
            await _answer(send, scope, error.fault)
            if error.fault.kind == "too_large":
                await self._discard(receive)
            return
        except _Gone:
            return
        changed: dict[str, Any] = {"path": path, "raw_path": path.encode()}
        if scope["method"] == "HEAD":
            changed |= {"method": "GET", HEAD: True}
        await self._app({**scope, **changed}, receive, send)

    def _page(self, headers: Headers, *, hostless: bool) -> str | None:
        """The foreign origin that is allowed and asks, if one does. Raises Refused for any other.

        A page cannot choose the headers Host, Origin and Sec-Fetch-Site; what lies about them is no browser.
        `hostless`: the protocol has requests without Host (HTTP/1.0), which no browser sends.
        """
        host = headers.one("host")
        if host is None and hostless and not headers.all("host"):
            host = ""
        elif host is None or not self._is_ours(host):
            raise refused(
                "permission", "The Host header names no host of this server; --allow-host adds a name."
            )
        origin = headers.one("origin")
        if len(headers.all("origin")) > 1 or (origin is not None and not _same(origin, host)):
            if origin in self._rules.origins:
                return origin
            raise refused("permission", "Pages of this origin may not ask; --cors-origin adds an origin.")
        site = headers.one("sec-fetch-site")
        if origin is None and site not in (None, "same-origin", "none"):
            raise refused("permission", "Pages of other sites may not ask.")
        return None

    def _is_ours(self, host: str) -> bool:
        """A name that a foreign page could make point here is none of ours, an address is."""
        name = _name_of(host)
        if name is None:
            return False
        allowed = {each.lower().strip("[]") for each in self._rules.hosts}
        return name == "localhost" or name.endswith(".localhost") or name in allowed or _is_address(name)

    def _key(self, method: str, path: str, headers: Headers) -> None:
        key = self._rules.api_key
        if key is not None and (method, path) not in OPEN and not _carries(headers, key):
            given = headers.all("authorization") or headers.all("x-api-key")
            told = "The key is not this server's." if given else "This server asks for a key."
            raise refused(
                "authentication",
                f"{told} Send the one of its --api-key, as a bearer token or as x-api-key.",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, scope: Any, headers: Headers, receive: Receive) -> Receive:
        """The whole body, checked, to be received again. Raises Refused."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return receive
        limit = self._rules.body_limit
        declared = headers.one("content-length") or "0"
        if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
            raise _too_large(limit)
        body = await self._read(receive, limit)
        if body and any(each.strip().lower() != "identity" for each in headers.all("content-encoding")):
            raise refused(
                "invalid_request",
                "The Content-Encoding header names a compression, which this server does not undo. "
                "Send the body as it is.",
                status=415,
            )
        kind = (headers.one("content-type") or "").partition(";")[0].strip().lower()
        if (body or kind) and kind != "application/json":
            raise refused(
                "invalid_request",
                "The body must be JSON, with the content type application/json.",
                status=415,
            )
        return _replayed(body, receive)

    async def _read(self, receive: Receive, limit: int) -> bytes:
        pieces: list[bytes] = []
        size, until = 0, monotonic() + self._rules.body_seconds
        more = True
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, until - monotonic()))
            except TimeoutError:
                raise refused("timeout", "The body did not arrive in time.", status=408) from None
            if message["type"] == "http.disconnect":
                raise _Gone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            more = message.get("more_body", False)
            if size > limit:
                raise _too_large(limit)
        return b"".join(pieces)

    async def _discard(self, receive: Receive) -> None:
        """A sender who is cut off may never read what was answered."""
        left, until = self._rules.body_limit * _DISCARDED, monotonic() + self._rules.body_seconds
        while left > 0 and monotonic() < until:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, until - monotonic()))
            except TimeoutError:
                return
            left -= len(message.get("body", b""))
            if not message.get("more_body", False):
                return


def has_key(scope: Any, key: str) -> bool:
    """Whether a request carries the key. Takes as long for a wrong one as for the right one."""
    return _carries(Headers(scope), key)


def _carries(headers: Headers, key: str) -> bool:
    scheme, _, bearer = (headers.one("authorization") or "").partition(" ")
    given = [headers.one("x-api-key") or "", bearer.strip() if scheme.lower() == "bearer" else ""]
    matching = [hmac.compare_digest(each.encode(), key.encode()) for each in given]
    return any(matching)


class _Gone(Exception):
    """The client left before its body was here."""


def _too_large(limit: int) -> Refused:
    return refused("too_large", f"The body is larger than {limit / 1e6:g} MB; --max-body-mb sets the limit.")


def _name_of(host: str) -> str | None:
    """The host of `host:port`, without brackets, in lower case; None where it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    plain = parts.username is None and not (parts.path or parts.query or parts.fragment)
    return parts.hostname if plain else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _same(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()


def _identified(send: Send, headers: Headers) -> Send:
    """Sends a request's id with the response, under the names that SDKs look for: the client's own where
    that is short and plain."""
    given = headers.one("x-request-id") or ""
    name = given if _PLAIN_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    REQUEST.set(name)
    told = [(each, name.encode()) for each in (b"x-request-id", b"request-id")]

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message.get("headers", ()), *told]}
        await send(message)

    return sending


def _with_cors(send: Send, origin: str) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            told = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = message | {"headers": [*message.get("headers", ()), *told]}
        await send(message)

    return sending


async def _preflight(headers: Headers, send: Send) -> None:
    wanted = headers.one("access-control-request-headers") or ""
    told = [
        (b"access-control-allow-methods", b"GET, POST, HEAD"),
        (b"access-control-allow-headers", wanted.encode("latin-1")),
        (b"access-control-max-age", _PREFLIGHT_SECONDS.encode()),
    ]
    if headers.one("access-control-request-private-network") == "true":
        told.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": told})
    await send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, scope: Any, fault: Fault) -> None:
    path = scope["path"]
    dialect = dialect_of(path, Headers(scope).one("anthropic-version"))
    status = dialect.status(fault)
    log_event("refused", method=scope["method"], path=path[:LONGEST_PATH], status=status, field=fault.field)
    await send_json(send, status, dialect.error(fault), fault.headers)


def _replayed(body: bytes, receive: Receive) -> Callable[[], Any]:
    told = False

    async def receiving() -> Any:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving
