"""Curves, remembered: one JSON file for all pairs, written whole and put in place.

    {"schema": 1,
     "entries": {KEY: {"curves": {...}, "about": {...}, "stale": "", "healed": 0}},
     "refused": {KEY: {"at": 0.0, "count": 1}}}

A file that is not of this kind is set aside; an entry that is damaged is as good as absent. Reading takes no
lock and no MLX.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

from mlx_dspark.calibration.shape import with_rows
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.errors import BadCurves
from mlx_dspark.foundation.json_file import aside_of, renew, set_aside
from mlx_dspark.foundation.numbers import is_finite, is_whole

SCHEMA = 1
FILE = "calibration.json"
OLD = 60 * 24 * 3600.0
"""Seconds after which an entry is measured anew."""
KEPT = 200
"""Most entries kept; the oldest go first."""
FIRST_WAIT, LONGEST_WAIT = 600.0, 24 * 3600.0
"""Seconds before a pair whose measurement was refused is measured again, doubled each time."""
HEAL_WAIT, HEAL_GROWTH = 3600.0, 8.0
"""Seconds that an entry stands which was measured anew since live rounds disagreed, and disagree again; so
many times longer each time."""
_PATIENCE, _LITTLE_PATIENCE = 10.0, 0.5

_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What reading a file raises that is not of this kind."""


@dataclass(frozen=True)
class Entry:
    """What was measured of one pair. `about` says in words what the key was made of; `stale` why live rounds
    say otherwise, if they do; `healed` how often in a row it was measured anew for that."""

    key: str
    curves: CostCurves
    about: Mapping[str, str]
    stale: str = ""
    healed: int = 0

    def outdated(self, now: float) -> str:
        """Why it should be measured anew; empty where it should not."""
        age = now - self.curves.measured_at
        if self.stale and not 0 <= age < self._stands:
            return self.stale
        return f"it is {age / 86400:.0f} days old" if age > OLD else ""

    @property
    def _stands(self) -> float:
        return min(OLD, HEAL_WAIT * HEAL_GROWTH ** min(self.healed - 1, 10)) if self.healed else 0.0


class CalibrationStore:
    """The file in `folder`. `now` gives unix time.

    What cannot be written is not remembered: the methods that write say why, or give an empty string.
    """

    def __init__(self, folder: Path, *, now: Callable[[], float] = time) -> None:
        self.file = folder / FILE
        self._now = now

    def recall(self, key: str) -> Entry | None:
        """The entry of this key, outdated or not; None where there is none, or a damaged one."""
        return _entry(key, self._read()["entries"].get(key))

    def entries(self) -> Iterator[Entry]:
        """Every entry that is whole, oldest first."""
        for key, recorded in self._read()["entries"].items():
            if (entry := _entry(key, recorded)) is not None:
                yield entry

    def waiting(self, key: str) -> float:
        """For how many more seconds no measurement should be tried again, after one that was refused."""
        at, count = _refusal(self._read()["refused"].get(key))
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(count - 1, 20)) if count else 0.0
        since = self._now() - at
        return wait - since if 0 <= since < wait else 0.0

    def remember(self, key: str, curves: CostCurves, about: Mapping[str, str]) -> str:
        """Keep curves, in place of what was kept for this key."""

        def change(content: dict[str, Any]) -> None:
            content["refused"].pop(key, None)
            old = _entry(key, content["entries"].pop(key, None))
            healed = old.healed + 1 if old is not None and old.stale else 0
            content["entries"][key] = {
                "curves": curves.to_json(),
                "about": dict(about),
                "stale": "",
                "healed": healed,
            }

        return self._write(change)

    def extend(self, key: str, more: CostCurves) -> str:
        """Add curves of other numbers of rows to an entry; nothing where it was measured anew meanwhile."""

        def change(content: dict[str, Any]) -> None:
            if (entry := _same(content, key, more.measured_at)) is not None:
                content["entries"][key]["curves"] = with_rows(entry.curves, more).to_json()

        return self._write(change, _LITTLE_PATIENCE)

    def mark_stale(self, key: str, measured_at: float, reason: str) -> str:
        """Have the entry of these curves measured anew by whoever loads the pair next."""

        def change(content: dict[str, Any]) -> None:
            if _same(content, key, measured_at) is not None:
                content["entries"][key]["stale"] = reason

        return self._write(change, _LITTLE_PATIENCE)

    def refuse(self, key: str) -> str:
        """Note that a measurement was not believed, so that the next one waits."""

        def change(content: dict[str, Any]) -> None:
            _, count = _refusal(content["refused"].get(key))
            content["refused"].pop(key, None)
            content["refused"][key] = {"at": self._now(), "count": count + 1}

        return self._write(change)

    def trouble(self) -> str:
        """Why the file cannot be read; empty where it can, or there is none."""
        try:
            self._content()
        except OSError as error:
            return error.strerror or str(error)
        except _DAMAGE:
            return "it is damaged, or of another version"
        return ""

    def damage(self, key: str) -> str:
        """What is damaged that a measurement of this key takes the place of; empty where nothing is."""
        try:
            content = self._content()
        except OSError:
            return ""
        except _DAMAGE:
            aside = aside_of(self.file)
            return f"{self.file} was damaged, or of another version, and is set aside as {aside}"
        recorded = content["entries"]
        damaged = key in recorded and _entry(key, recorded[key]) is None
        return f"what {self.file} held of this pair was damaged" if damaged else ""

    def damaged_entries(self) -> int:
        """How many entries cannot be read."""
        return sum(_entry(key, entry) is None for key, entry in self._read()["entries"].items())

    # the file ------------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        try:
            return self._content()
        except (OSError, *_DAMAGE):
            return _nothing()

    def _content(self) -> dict[str, Any]:
        """What the file holds. Raises for one that is not of this kind."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return _nothing()
        if content["schema"] != SCHEMA or isinstance(content["schema"], bool):
            raise ValueError("another schema")
        if not all(isinstance(content[part], dict) for part in ("entries", "refused")):
            raise TypeError("not a table")
        return content

    def _write(self, change: Callable[[dict[str, Any]], None], patience: float = _PATIENCE) -> str:
        def changed() -> dict[str, Any]:
            content = self._kept()
            change(content)
            for part in ("entries", "refused"):
                content[part] = dict(list(content[part].items())[-KEPT:])
            return content

        return renew(self.file, changed, patience=patience)

    def _kept(self) -> dict[str, Any]:
        """What the file holds, under the lock; one that is not of this kind is renamed to `*.damaged`."""
        try:
            return self._content()
        except _DAMAGE:
            set_aside(self.file)
            return _nothing()


def _nothing() -> dict[str, Any]:
    return {"schema": SCHEMA, "entries": {}, "refused": {}}


def _entry(key: str, recorded: Any) -> Entry | None:
    try:
        about, stale = recorded["about"], recorded["stale"]
        words = [stale, *about, *about.values()]
        healed = recorded["healed"]
        if not all(isinstance(word, str) for word in words) or not is_whole(healed) or healed < 0:
            return None
        return Entry(key, CostCurves.from_json(recorded["curves"]), about, stale, healed)
    except (BadCurves, *_DAMAGE):
        return None


def _same(content: dict[str, Any], key: str, measured_at: float) -> Entry | None:
    """The entry of this key, if it is of this measurement."""
    entry = _entry(key, content["entries"].get(key))
    return entry if entry is not None and entry.curves.measured_at == measured_at else None


def _refusal(recorded: Any) -> tuple[float, int]:
    """When a measurement was last refused, and how often; nothing where that is damaged."""
    if isinstance(recorded, dict):
        at, count = recorded.get("at"), recorded.get("count")
        if is_finite(at) and is_whole(count) and count > 0:
            return float(at), count
    return 0.0, 0
