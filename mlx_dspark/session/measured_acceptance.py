"""The accept lengths that `doctor --pair` found on this machine, by the target's content and its drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_dspark.catalog.pair_row import Expected
from mlx_dspark.foundation.json_file import renew
from mlx_dspark.foundation.numbers import is_finite

FILE = "acceptance.json"
PATIENCE = 2.0


def measured_acceptance(cache_dir: Path, target: str, drafter: str, mode: str) -> tuple[Expected, ...]:
    """What was remembered, by content; empty where nothing was measured.

    `target` is the checkpoint's fingerprint, `drafter` what the row calls it. A damaged file counts as none.
    """
    entries = _read(cache_dir / FILE).get(_key(target, drafter, mode))
    found = map(_expected, entries if isinstance(entries, list) else ())
    return tuple(each for each in found if each is not None and each.mode == mode)


def remember_acceptance(
    cache_dir: Path, target: str, drafter: str, mode: str, found: Sequence[Expected]
) -> str:
    """Keep what was found. Returns why that failed, or an empty string."""
    file, entry = cache_dir / FILE, {_key(target, drafter, mode): [asdict(each) for each in found]}
    return renew(file, lambda: _read(file) | entry, patience=PATIENCE)


def _key(target: str, drafter: str, mode: str) -> str:
    return f"{target} {mode} {drafter}"


def _expected(entry: Any) -> Expected | None:
    """One entry as it was written; None for a damaged one."""
    match entry:
        case {"mode": str(mode), "content": str(content), "cap": int(cap), "reached": [*reached]}:
            shares = all(is_finite(each) and 0 <= each <= 1 for each in reached)
            if not shares or len(reached) != cap or cap < 1:
                return None
            return Expected(mode, content, cap, 1.0 + sum(reached), tuple(map(float, reached)))
    return None


def _read(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
