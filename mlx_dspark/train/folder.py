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
from mlx_dspark.train.checkpoint import KEPT, write_json


class RunFolder:
    """`output` and what is in it."""

    def __init__(self, output: Path) -> None:
        self.output = output.expanduser().absolute()
        self.run = self.output / "run"
        self.checkpoints = self.run / "checkpoints"
        self.log = self.run / "log.jsonl"
        self._marker = self.run / "run.json"

    @contextmanager
    def claimed(self, identity: Mapping[str, Any]) -> Iterator[None]:
        """Hold the folder for a run of `identity`, the settings that may not change when a run goes on.

        Raises UsageError when another process holds it, when it cannot be written, when it holds other
        things, or when its run has other settings.
        """
        if self.output.exists() and not self._marker.is_file() and not self._is_empty():
            raise UsageError(
                f"{self.output} is not empty and was not written by train.",
                "Name a new folder.",
                field="output",
            )
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with FileLock(self.run / "lock", timeout=0):
                self._check(identity)
                yield
        except Timeout as error:
            raise UsageError(
                f"{self.output} is in use by another run.",
                "Wait for it, or name another folder.",
                field="output",
            ) from error
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise UsageError(
                f"{self.output} cannot be written: {error.strerror or error}.",
                "Name another folder.",
                field="output",
            ) from error

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
            and (
                not self.run.exists()
                or {entry.name for entry in self.run.iterdir()} <= {"lock", "checkpoints", "data"}
            )
        )

    def _check(self, identity: Mapping[str, Any]) -> None:
        wanted = json.loads(json.dumps(identity))
        if not self._marker.is_file():
            write_json(self._marker, wanted)
            return
        found = json.loads(self._marker.read_text(encoding="utf-8"))
        for name, value in wanted.items():
            if found.get(name) != value:
                raise UsageError(
                    f"{name} is {value!r}, and the run in {self.output} was begun with {found.get(name)!r}.",
                    "Give the same value to go on with that run, or name another folder.",
                    field=name,
                )
