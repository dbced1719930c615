"""What `benchmark` found each mode to gain on this machine, remembered by the content of the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mlx_dspark.foundation.json_file import renew
from mlx_dspark.foundation.numbers import is_finite

FILE = "modes.json"
PATIENCE = 2.0


def measured_gains(cache_dir: Path, target: str) -> dict[str, float]:
    """By mode, how often faster than plain decoding it was; empty where nothing was measured.

    `target` is the checkpoint's fingerprint. A damaged file counts as none.
    """
    gains = _read(cache_dir / FILE).get(target)
    if not isinstance(gains, dict):
        return {}
    return {mode: float(gain) for mode, gain in gains.items() if is_finite(gain) and gain > 0}


def remember_gains(cache_dir: Path, target: str, gains: Mapping[str, float]) -> str:
    """Keep the gains of one run in the place of earlier ones. Returns why that failed, or an empty string."""
    file = cache_dir / FILE
    return renew(file, lambda: _read(file) | {target: dict(gains)}, patience=PATIENCE)


def _read(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
