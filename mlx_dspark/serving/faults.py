"""What a client is told when its request cannot be served: one place from errors to statuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mlx_dspark.foundation.errors import ContextOverflow, DsparkError, RequestError, UsageError

FaultKind = Literal[
    "invalid_request",
    "context_overflow",
    "authentication",
    "permission",
    "not_found",
    "timeout",
    "too_large",
    "rate_limit",
    "server",
    "overloaded",
]
STATUS: Mapping[FaultKind, int] = MappingProxyType(
    {
        "invalid_request": 400,
        "context_overflow": 400,
        "authentication": 401,
        "permission": 403,
        "not_found": 404,
        "timeout": 504,
        "too_large": 413,
        "rate_limit": 429,
        "server": 500,
        "overloaded": 503,
    }
)


@dataclass(frozen=True)
class Fault:
    """Why a request is not served. Each dialect words it in its own error body.

    `field` is the body's field at fault. `status` may be more exact than the kind's own.
    """

    kind: FaultKind
    message: str
    field: str | None = None
    status: int = 0
    headers: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    error: DsparkError | None = None

    @property
    def code(self) -> int:
        """The HTTP status."""
        return self.status or STATUS[self.kind]


class Refused(Exception):
    """Raised where a request is turned away; carries the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)


def refused(
    kind: FaultKind,
    message: str,
    *,
    field: str | None = None,
    status: int = 0,
    headers: Mapping[str, str] | None = None,
) -> Refused:
    """The exception for a fault."""
    return Refused(Fault(kind, message, field, status, headers or {}))


def fault_of(error: BaseException) -> Fault:
    """The fault that an error amounts to. What it was in detail is not told to clients."""
    match error:
        case Refused():
            return error.fault
        case ContextOverflow():
            return Fault("context_overflow", str(error), error.field, error=error)
        case RequestError() | UsageError():
            return Fault("invalid_request", str(error), error.field, error=error)
        case _:
            return Fault("server", "The server failed to answer this request; its log says why.")
