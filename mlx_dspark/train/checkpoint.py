"""Checkpoints of a run. Each is a drafter folder in float32, with the optimizer's state beside it.

step-00000500/config.json, model.safetensors     any loader of the format opens these
              optimizer.safetensors, state.json
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dspark.foundation.errors import BadCheckpoint

KEPT = 2
STATE = "state.json"


@dataclass(frozen=True)
class RunState:
    """Where a run is: steps done and seconds of training."""

    step: int = 0
    seconds: float = 0.0


def save_checkpoint(
    folder: Path,
    state: RunState,
    config: Mapping[str, Any],
    weights: dict[str, mx.array],
    optimizer: dict[str, mx.array],
) -> Path:
    """Write a checkpoint, whole or not at all, and drop all but the newest two. Raises OSError when the disk
    is full."""
    final = folder / f"step-{state.step:08d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_arrays(partial / "model.safetensors", weights, {"format": "mlx"})
        save_arrays(partial / "optimizer.safetensors", optimizer)
        write_json(partial / "config.json", config)
        write_json(partial / STATE, asdict(state))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / STATE).is_file())


def read_state(checkpoint: Path) -> tuple[RunState, dict[str, mx.array]]:
    """The run's state and the optimizer's. Raises BadCheckpoint."""
    try:
        state = RunState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
        optimizer = mx.load(str(checkpoint / "optimizer.safetensors"))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise BadCheckpoint(
            f"The checkpoint {checkpoint} is damaged: {error}.",
            "Delete it; the run then goes on from the one before.",
        ) from error
    assert isinstance(optimizer, dict)
    return state, optimizer


def save_arrays(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError when the disk is full; nothing is left of the file then."""
    mx.eval(arrays)
    try:
        mx.save_safetensors(str(path), arrays, metadata or {})
    except RuntimeError as error:
        path.unlink(missing_ok=True)
        code = errno.ENOSPC if "write" in str(error) else errno.EIO
        raise OSError(code, str(error), str(path)) from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    scratch = path.with_name(path.name + ".new")
    try:
        scratch.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
