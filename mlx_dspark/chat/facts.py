"""What a chat template knows, found out by reading it and by rendering it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from mlx_dspark.chat.template import apply_template
from mlx_dspark.foundation.chat import EFFORTS
from mlx_dspark.foundation.errors import DsparkError

SWITCH_NAMES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on and off."""
EFFORT_NAMES = ("reasoning_effort", "reasoning_strength", "thinking_effort", "effort")
"""Template variables that say how much to reason."""
_USUAL_EFFORTS = ("low", "medium", "high")
_STRENGTHS = (*_USUAL_EFFORTS, "xhigh")
"""Those of `reasoning_strength` (Muse)."""
_NO_EFFORT = "no-such-effort"

Render = Callable[[Mapping[str, Any]], str | None]
"""A short conversation through the template with these variables; None where the template refuses them."""


class TemplateFacts:
    """What the template of one tokenizer knows. A template that is code, not text, is taken to know tools and
    `enable_thinking`, which mlx-lm passes to it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.source = _source(tokenizer)
        self.knows_tools = not self.source or bool(names_in(self.source, ("tools",)))

    @cached_property
    def effort_names(self) -> tuple[str, ...]:
        """The variables that say how much to reason."""
        return names_in(self.source, EFFORT_NAMES)

    @cached_property
    def efforts(self) -> tuple[str, ...]:
        """The efforts that the template tells apart, from least to most; empty where it has none."""
        return efforts_of(self.source, self.effort_names[0], self._probe) if self.effort_names else ()

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """The variables that turn reasoning on and off; empty where there are none that do."""
        names = names_in(self.source, SWITCH_NAMES) if self.source else SWITCH_NAMES[:1]
        on, off = (self._probe(dict.fromkeys(names, thinking)) for thinking in (True, False))
        return names if on != off else ()

    def unread(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of `names` that the template does not read."""
        return tuple(name for name in names if self.source and not names_in(self.source, (name,)))

    def _probe(self, variables: Mapping[str, Any]) -> str | None:
        asked = [{"role": "user", "content": "?"}]
        try:
            return apply_template(self._tokenizer, asked, None, variables, tokenize=False)
        except DsparkError:
            return None


def names_in(template: str, names: Sequence[str]) -> tuple[str, ...]:
    """Those of `names` that the template reads as variables."""
    code = " ".join(re.findall(r"\{[{%].*?[%}]\}", template, re.DOTALL))
    return tuple(name for name in names if re.search(rf"(?<![\w.'\"]){re.escape(name)}(?![\w'\"])", code))


def efforts_of(template: str, name: str, render: Render) -> tuple[str, ...]:
    """The efforts that a template tells apart in its variable `name`, from least to most.

    A template that writes any value into the prompt is taken to know those of its family, and those that it
    spells out.
    """
    known = _STRENGTHS if name == "reasoning_strength" else _USUAL_EFFORTS
    unknown = render({name: _NO_EFFORT})
    written = unknown is not None and _NO_EFFORT in unknown
    found: list[str] = []
    for effort in EFFORTS:
        rendered = render({name: effort})
        if rendered is None:
            continue
        spelled = re.search(rf"['\"]{effort}['\"]", template) is not None
        usual = written and effort in known
        if spelled or usual or (not written and rendered != unknown):
            found.append(effort)
    return tuple(found)


def nearest_effort(asked: str, known: Sequence[str]) -> str:
    """The known effort nearest to the one asked for; of two equally near, the lesser. None at all is near to
    nothing else."""
    scale = EFFORTS.index
    near = [effort for effort in known if (effort == EFFORTS[0]) == (asked == EFFORTS[0])] or known
    return min(near, key=lambda effort: (abs(scale(effort) - scale(asked)), scale(effort)))


def _source(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else ""
