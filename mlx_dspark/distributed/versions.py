"""What the processes of a run compare before they work together."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

from mlx_dspark._version import __version__


def versions() -> dict[str, object]:
    """The versions that decide what is computed, and in which order."""
    others = ("mlx", "mlx-lm", "transformers")
    return {"mlx-dspark": __version__, **{name: version(name) for name in others}}


def digest(value: object) -> str:
    """A few letters that stand for a value of numbers, texts, lists and mappings."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
