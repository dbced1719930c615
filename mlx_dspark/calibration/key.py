"""What curves belong to: two runs of one key cost the same. The only place that makes keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import mlx.core as mx

from mlx_dspark.kernels.race import processor_name
from mlx_dspark.kernels.threads import usable_cores

NAME = "name"
METHOD = 1
"""Counts the ways of measuring: curves of another one are not compared."""


def describe(
    *,
    name: str,
    target: str,
    drafter: str,
    quantization: Mapping[str, object],
    sources: Sequence[tuple[str, int, bool]],
    states: Sequence[str],
    kernels: Sequence[str],
) -> dict[str, str]:
    """What a pair and this machine are, in words, for `key_of`.

    `name` is for people and counts for nothing. `target` and `drafter` are fingerprints of their content,
    that of a drafter without weights empty; `quantization` says how both are held, `sources` what drafts:
    (name, most drafts, sizes its own drafts); `states` are the kinds of states, those with few bits named so,
    and how rows lie; `kernels` the kernels placed, with their versions.
    """
    facts = {
        NAME: name,
        "target": target,
        "drafter": drafter,
        "quantization": json.dumps(quantization, sort_keys=True, default=str),
        "sources": json.dumps([list(each) for each in sources]),
        "states": ", ".join(states),
        "kernels": ", ".join(kernels),
    }
    return facts | _machine()


def _machine() -> dict[str, str]:
    device = mx.default_device()
    told = mx.device_info()
    return {
        "device": f"{device.type.name} {told.get('device_name') or processor_name()}".strip(),
        "memory": str(told.get("memory_size", "")),
        "cores": str(usable_cores()),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "method": str(METHOD),
    }


def key_of(facts: Mapping[str, str]) -> str:
    """The name that the store keeps these facts under."""
    counted = {fact: value for fact, value in facts.items() if fact != NAME}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:32]
