"""What a chat template knows, found out by reading it and by rendering it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from mlx_dspark.foundation.chat import EFFORTS

THINKING_NAMES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on and off."""
EFFORT_NAMES = ("reasoning_effort", "thinking_effort", "effort")
"""Template variables that say how much to reason."""
_USUAL_EFFORTS = ("low", "medium", "high")
_NO_EFFORT = "no-such-effort"

Render = Callable[[Mapping[str, Any]], str | None]
"""A short conversation through the template with these variables; None where the template refuses them."""


def names_in(template: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `names` that the template reads as variables."""
    code = " ".join(re.findall(r"\{[{%].*?[%}]\}", template, re.DOTALL))
    return tuple(name for name in names if re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", code))


def efforts_of(template: str, name: str, render: Render) -> tuple[str, ...]:
    """The efforts that a template tells apart in its variable `name`, from least to most.

    A template that writes any value into the prompt is taken to know low, medium and high, and those that it
    spells out.
    """
    unknown = render({name: _NO_EFFORT})
    written = unknown is not None and _NO_EFFORT in unknown
    found: list[str] = []
    for effort in EFFORTS:
        rendered = render({name: effort})
        if rendered is None:
            continue
        spelled = re.search(rf"['\"]{effort}['\"]", template) is not None
        usual = written and effort in _USUAL_EFFORTS
        if spelled or usual or (not written and rendered != unknown):
            found.append(effort)
    return tuple(found)


def nearest_effort(asked: str, known: tuple[str, ...]) -> str:
    """The known effort nearest to the one asked for; of two equally near, the lesser."""
    scale = EFFORTS.index
    return min(known, key=lambda effort: (abs(scale(effort) - scale(asked)), scale(effort)))
