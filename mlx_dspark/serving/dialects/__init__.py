"""Dialects by route. To add one: a file here, and its line in DIALECTS."""

from __future__ import annotations

from mlx_dspark.serving.dialects.anthropic import AnthropicMessages
from mlx_dspark.serving.dialects.base import Dialect
from mlx_dspark.serving.dialects.openai import OpenAIChat
from mlx_dspark.serving.dialects.openai_text import OpenAIText

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAIText(), AnthropicMessages())
"""Every way to ask. The first one words the errors of routes that are nobody's, the last one does for
clients of Anthropic's."""


def dialect_of(path: str, version: str | None = None) -> Dialect:
    """Whose route a path is; of one that is nobody's, who asks by the header `anthropic-version`."""
    path = path.rstrip("/")
    own = next((each for each in DIALECTS if path in (*each.paths, *each.counting)), None)
    return own or (DIALECTS[-1] if version else DIALECTS[0])
