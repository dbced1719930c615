"""Answers about a model, remembered: what was asked of these weights, on this device, with these versions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlx_dspark._version import __version__
from mlx_dspark.foundation.json_file import renew
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.faithful.probes import VERSION, Faithfulness, faithfulness

KEPT = 200
"""Most answers kept; the oldest go first."""

_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a file raises that is not a memory of answers."""


def remembered_faithfulness(
    target: DenseTarget, taps: tuple[int, ...], *, rows: bool, fingerprint: str, cache_dir: Path
) -> Faithfulness:
    """As `faithfulness`, asked once for a model of this fingerprint.

    A file in `cache_dir` that cannot be read or holds something else is asked anew and written over; one that
    cannot be written is done without.
    """
    memory, key = FaithfulMemory(cache_dir), _key(target, taps, rows, fingerprint)
    known = memory.recall(key)
    if known is None:
        known = faithfulness(target, taps, rows=rows)
        memory.remember(key, known)
    return known


def _key(target: DenseTarget, taps: tuple[int, ...], rows: bool, fingerprint: str) -> str:
    """Everything that an answer depends on."""
    facts = {
        "model": fingerprint,
        "taps": taps,
        "rows": rows,
        "weights": target.report.choice if target.report is not None else None,
        "kernels": target.kernels.key() if target.kernels is not None else [],
        "replayed": target.replayed,
        "states": target.state_kinds,
        "layout": target.layout.value,
        "device": [str(mx.default_device()), sorted(map(str, mx.device_info().items()))],
        "versions": [VERSION, __version__, version("mlx"), version("mlx-lm")],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class FaithfulMemory:
    """Answers by key in one JSON file, written whole and put in place."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "faithful.json"

    def recall(self, key: str) -> Faithfulness | None:
        """The answer for `key`, or None."""
        entry = self._entries().get(key)
        return _read(entry) if entry is not None else None

    def remember(self, key: str, answer: Faithfulness) -> None:
        """Keep an answer, where the folder can be written."""
        renew(self._file, lambda: dict(list({**self._entries(), key: asdict(answer)}.items())[-KEPT:]))

    def _entries(self) -> dict[str, dict[str, str]]:
        """What the file holds; nothing where any of it is not an answer."""
        try:
            content = json.loads(self._file.read_text())
            for entry in content.values():
                _read(entry)
            return content
        except (OSError, *_DAMAGE):
            return {}


def _read(entry: dict[str, str]) -> Faithfulness:
    if set(entry) != {field.name for field in fields(Faithfulness)}:
        raise ValueError("not an answer")
    if not all(isinstance(reason, str) for reason in entry.values()):
        raise TypeError("a reason is text")
    return Faithfulness(**entry)
