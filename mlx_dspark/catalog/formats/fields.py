"""Typed reading of a config.json: a wrong or missing value is an error that names the key and the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.numbers import brief, is_finite, is_whole

HIGHEST = 2**31 - 1
LEAST, MOST = 1e-12, 1e12
"""Bounds of a number, far from where float32 arithmetic with it overflows."""


def read_config(folder: Path) -> Fields:
    """The config.json of `folder`. Raises BadCheckpoint when it is missing or not a JSON object."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadCheckpoint(
            f"{folder} holds no config.json.", "Give the folder of a complete drafter checkpoint."
        ) from error
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read: {error.strerror or error}.", "Check the path and its rights."
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}.", "Download the drafter again.") from error
    if not isinstance(values, dict):
        raise BadCheckpoint(f"{path} does not hold a JSON object.", "Download the drafter again.")
    return Fields(values, path)


class Fields:
    """The keys of one config section. A key whose value is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.file = file
        self._null = frozenset(key for key, value in values.items() if value is None)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def is_null(self, name: str) -> bool:
        """Whether the key is there and says null, which for a few keys is not the same as being absent."""
        return name in self._null

    def bad(self, name: str, problem: str) -> NoReturn:
        """Raises BadCheckpoint about key `name`."""
        raise BadCheckpoint(
            f"{name} in {self.file} {problem}.", "Correct the file, or download it again.", field=name
        )

    def require(self, names: Iterable[str]) -> None:
        """Raises BadCheckpoint listing every absent key."""
        missing = [name for name in names if name not in self.values]
        if missing:
            raise BadCheckpoint(
                f"{self.file} lacks {', '.join(missing)}.",
                "Give a complete drafter checkpoint; is this the config of another model?",
                field=missing[0],
            )

    def whole(self, name: str, default: int | None = None, *, low: int = 1, high: int = HIGHEST) -> int:
        """An integer from `low` to `high`; required when there is no default."""
        if name not in self.values and default is not None:
            return default
        self.require([name])
        value = self.values[name]
        if not is_whole(value):
            self.bad(name, f"is {brief(value)}, not an integer")
        if not low <= value <= high:
            self.bad(name, f"is {brief(value)}, outside {low} to {high}")
        return value

    def number(
        self, name: str, default: float, *, above: float = 0.0, low: float = LEAST, high: float = MOST
    ) -> float:
        """A finite number above `above`, and from `low` to `high`."""
        value = self.values.get(name, default)
        if not is_finite(value):
            self.bad(name, f"is {brief(value)}, not a finite number")
        if value <= above:
            self.bad(name, f"is {brief(value)}, not above {above:g}")
        if not low <= value <= high:
            self.bad(name, f"is {brief(value)}, outside {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A true or a false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self.bad(name, f"is {brief(value)}, not true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.values.get(name, default)
        if not isinstance(value, str):
            self.bad(name, f"is {brief(value)}, not a string")
        return value

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of integers, required and not empty."""
        self.require([name])
        value = self.values[name]
        if not isinstance(value, list) or not value or not all(is_whole(item) for item in value):
            self.bad(name, f"is {brief(value)}, not a list of integers")
        return tuple(value)

    def texts(self, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        """A list of strings."""
        value = self.values.get(name, list(default))
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.bad(name, f"is {brief(value)}, not a list of strings")
        return tuple(value)

    def section(self, name: str) -> Fields:
        """A nested object; absent reads as empty."""
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            self.bad(name, f"is {brief(value)}, not an object")
        return Fields(value, self.file)
