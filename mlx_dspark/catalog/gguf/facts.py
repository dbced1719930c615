"""Typed reading of the metadata that describes a model's architecture."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_dspark.catalog.gguf.file import FETCH_AGAIN, GGUFFile
from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.numbers import brief, is_finite, is_whole

_HIGHEST = 2**31 - 1
_LARGEST = 1e30


class Facts:
    """The keys of one architecture: `facts.whole("block_count")` reads `qwen3.block_count`.

    A list that says the same for every layer reads as that one value. Raises BadCheckpoint naming a key that
    is absent or of the wrong type, UnsupportedModel for one that says something else for every layer.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def whole(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer of at least `low`; required when there is no default."""
        value = self._value(key, default)
        if not is_whole(value) or not low <= value <= _HIGHEST:
            self._bad(key, value, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A number above `above`, as the decimal its float32 was written from: 9.99999974e-06 -> 1e-05."""
        value = self._value(key, default)
        if not is_finite(value) or not above < value <= _LARGEST:
            self._bad(key, value, f"a number above {above:g}")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self._bad(key, value, "a string")
        return value

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def _value(self, key: str, default: Any) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.file.need(name) if default is None else self.file.metadata.get(name, default)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise self.file.unsupported(f"layers that differ in {name}", "layers that are all alike")
            return value[0]
        return value

    def _bad(self, key: str, value: Any, wanted: str) -> None:
        raise BadCheckpoint(
            f"{self.architecture}.{key} in {self.file.path} is {brief(value)}, not {wanted}.", FETCH_AGAIN
        )
