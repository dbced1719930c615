"""Dialects by route. To add one: a file here, and its line in DIALECTS."""

from __future__ import annotations

from mlx_dspark.serving.dialects.anthropic import AnthropicMessages
from mlx_dspark.serving.dialects.base import Dialect
from mlx_dspark.serving.dialects.openai import OpenAIChat
from mlx_dspark.serving.dialects.openai_text import OpenAIText

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAIText(), AnthropicMessages())
"""Every way to ask; the first one words the errors of routes that are nobody's."""


def dialect_of(path: str) -> Dialect:
    """Whose route a path is."""
    path = path.rstrip("/")
    return next((each for each in DIALECTS if path in (*each.paths, *each.counting)), DIALECTS[0])
