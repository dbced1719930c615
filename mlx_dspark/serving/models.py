"""`/v1/models`: the one model that is loaded, with the fields of both protocols.

https://platform.openai.com/docs/api-reference/models, https://platform.claude.com/docs/en/api/models-list
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from mlx_dspark.serving.dialects.base import json_bytes
from mlx_dspark.serving.faults import refused
from mlx_dspark.serving.host import Host

PATHS = ("/v1/models", "/models")


def add_models(app: FastAPI, host: Host) -> None:
    """The routes that list models."""
    created = int(time.time())

    async def models() -> Response:
        """The loaded model, or none."""
        data = listed(host, created)
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return _json({"object": "list", "data": data, "has_more": False, **ends})

    async def model(name: str) -> Response:
        """The loaded model, by its name."""
        for each in listed(host, created):
            if each["id"] == name:
                return _json(each)
        now = (
            "No model is loaded"
            if host.model is None
            else f"The model that is loaded is {host.model.session.name}"
        )
        raise refused(
            "not_found", f"{now}, and not one of this name. GET /v1/models lists it.", field="model"
        )

    for path in PATHS:
        prefix = path.strip("/").replace("/", "_")
        app.add_api_route(path, models, name=prefix, response_model=None)
        app.add_api_route(f"{path}/{{name:path}}", model, name=f"{prefix}_one", response_model=None)


def listed(host: Host, created: int) -> list[dict[str, Any]]:
    """What is told of each model."""
    if host.model is None:
        return []
    context, name = host.model.context or None, host.model.session.name
    return [
        {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "max_input_tokens": context,
            "max_tokens": min(host.defaults.max_tokens_cap, context or host.defaults.max_tokens_cap),
            "thinking": bool(host.model.session.format.layout.marks),
            "object": "model",
            "created": created,
            "owned_by": "mlx-dspark",
            "context_length": context,
            "max_model_len": context,
        }
    ]


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")
