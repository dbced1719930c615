"""The folder of a run: the finished drafter on top, everything that leads to it below `run/`.

config.json, model.safetensors, README.md    the drafter and its card
run/run.json                                 the settings; marks the folder as ours
run/data/, run/checkpoints/, run/log.jsonl
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.train.checkpoint import KEPT, checkpoints, write_json

_BEFORE = {"lock", "checkpoints", "data", "log.jsonl"}
"""What may be in `run/` before the first checkpoint."""


class RunFolder:
    """`output` and what is in it."""

    def __init__(self, output: Path) -> None:
        try:
            self.output = output.expanduser().absolute()
        except RuntimeError as error:
            raise UsageError(
                f"{output} cannot be written: {error}", "Name another folder.", field="output"
            ) from error
        self.run = self.output / "run"
        self.checkpoints = self.run / "checkpoints"
        self.log = self.run / "log.jsonl"
        self._marker = self.run / "run.json"
        self._identity: dict[str, Any] = {}

    @contextmanager
    def claimed(self, identity: Mapping[str, Any]) -> Iterator[None]:
        """Hold the folder for a run of `identity`, the settings that may not change when a run goes on.

        Raises UsageError when another process holds it, when it cannot be made or written, when it holds
        other things, or when its run has other settings.
        """
        self._identity = json.loads(json.dumps(identity))
        lock = FileLock(self.run / "lock", timeout=0)
        try:
            if self.output.exists() and not self._marker.is_file() and not self._is_empty():
                raise UsageError(
                    f"{self.output} is not empty and was not written by train.",
                    "Name a new folder.",
                    field="output",
                )
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout as error:
            raise UsageError(
                f"{self.output} is in use by another run.",
                "Wait for it, or name another folder.",
                field="output",
            ) from error
        except OSError as error:
            raise UsageError(
                f"{self.output} cannot be written: {error.strerror or error}.",
                "Name another folder.",
                field="output",
            ) from error
        try:
            self._check()
            yield
        finally:
            lock.release()

    def bind(self) -> None:
        """From here on the run goes on with the identity it was claimed for, and with no other."""
        if not self._binds():
            write_json(self._marker, self._identity)

    def check_room(self, parameters: int) -> None:
        """Raises UsageError when the disk cannot hold the run's checkpoints for so many parameters."""
        needed = 4 * parameters * (3 * (KEPT + 1) + 1)
        free = shutil.disk_usage(self.output).free
        if free < needed:
            raise UsageError(
                f"{self.output} has room for {free / 1e9:.1f} GB, and the run needs {needed / 1e9:.1f} GB.",
                "Make room, or name a folder on another disk.",
                field="output",
            )

    def _is_empty(self) -> bool:
        return (
            self.output.is_dir()
            and {entry.name for entry in self.output.iterdir()} <= {"run"}
            and (not self.run.exists() or {entry.name for entry in self.run.iterdir()} <= _BEFORE)
        )

    def _binds(self) -> bool:
        """Whether there is anything that other settings would not go on with."""
        begun = checkpoints(self.checkpoints) or (self.output / "model.safetensors").exists()
        return self._marker.is_file() and bool(begun)

    def _check(self) -> None:
        if not self._binds():
            return
        found = json.loads(self._marker.read_text(encoding="utf-8"))
        for name, value in self._identity.items():
            if found.get(name) != value:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {_told(value)}, and the run in {self.output} was begun "
                    f"with {_told(found.get(name))}.",
                    "Give the same value to go on with that run, or name another folder.",
                    field=name,
                )


def _told(value: Any) -> str:
    return "not given" if value is None else repr(value)
