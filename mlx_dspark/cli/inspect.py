"""`inspect`: what a drafter or a model is, and whether it would run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress, note
from mlx_dspark.cli.streams import require_output
from mlx_dspark.foundation.doctor_settings import InspectSettings
from mlx_dspark.foundation.errors import LoadError, UsageError

UNKNOWN = "unknown"


def inspect(settings: InspectSettings) -> int:
    """Tell what a drafter or a model is, and its pair; exit code 2, with the reason, if it would not run."""
    from mlx_dspark.catalog.fit import gigabytes
    from mlx_dspark.catalog.inspecting import (
        inspect_description,
        inspect_drafter,
        inspect_model,
        is_drafter,
    )
    from mlx_dspark.catalog.pairs import load_registry
    from mlx_dspark.targets.load import refuse_config, refuse_model

    refuse_ranks("inspect")
    if not settings.thing:
        raise UsageError("inspect is given nothing.", "Name a drafter or a model.", field="thing")
    require_output()
    progress, known = Progress(), load_registry()
    for fault in known.faults:
        note(f"mlx-dspark: {fault}")
    found = _found(settings.thing, progress)
    progress.clear()
    if isinstance(found, _Unfetched):
        finding = inspect_description(found.name, found.bytes, known.pairs, refuse_config)
        note(
            f"mlx-dspark: The weights of {found.name} ({gigabytes(found.bytes)}) are not on this machine. "
            f"`mlx-dspark pull {found.name}` fetches them."
        )
    elif is_drafter(found):
        finding = inspect_drafter(found, known.pairs)
    else:
        finding = inspect_model(found, known.pairs, refuse_model)
    code = 0 if finding.live else 2
    if settings.json:
        print(json.dumps(dataclasses.asdict(finding), ensure_ascii=False))
        return code
    state = "would run" if finding.live else f"refused: {finding.refused}"
    print(f"{finding.name} is a {finding.kind}; {state}")
    for name, value in _flat(finding.facts):
        print(f"{name.replace('_', ' '):18} {_told(value)}")
    return code


class _Unfetched(Exception):
    """A model of the hub whose weights would have to be fetched: so many `bytes`."""

    def __init__(self, name: str, bytes_: int) -> None:
        super().__init__(name)
        self.name, self.bytes = name, bytes_


def _found(name: str, progress: Progress) -> Any:
    """A model, else a drafter: a drafter's files have names that a model's need not have.

    Weights of a model are not fetched to be looked at; a drafter is known by its tensors.
    """
    from mlx_dspark.catalog.folder import is_drafter_config
    from mlx_dspark.catalog.hub import is_hub_id
    from mlx_dspark.catalog.pairs import target_of
    from mlx_dspark.catalog.resolve import resolve_drafter, resolve_model
    from mlx_dspark.foundation.paths import default_cache_dir

    def weigh(config: dict[str, Any], size: int) -> None:
        if config and not is_drafter_config(config):
            raise _Unfetched(target_of(name), size)

    try:
        return resolve_model(
            name, cache_dir=default_cache_dir(), trust_remote_code=False, progress=progress, weigh=weigh
        )
    except _Unfetched as found:
        return found
    except LoadError:
        if not is_hub_id(name):
            raise
        return resolve_drafter(name, progress=progress)


def _flat(facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The facts, a line for each; what the pair's row records follows the others."""
    recorded = facts.get("recorded", {})
    yield from ((name, value) for name, value in facts.items() if name != "recorded")
    yield from ((f"recorded {name}", value) for name, value in recorded.items())


def _told(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_told(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_told_item, value)) or "none"
    return str(value)


def _told_item(value: object) -> str:
    return "unbounded" if value is None else str(value)
