"""Verdicts, remembered: one JSON file for all kernels, by device, MLX version, kernel version and case.

    {"schema": 2, "machines": {MACHINE: {"KERNEL VERSION": {"SHAPE x WIDTH": {..., "at": 0.0}}}}}

A file that is not of this kind is set aside. Verdicts that other work on the machine may have caused are good
for a while only.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any

import mlx.core as mx

from mlx_dspark.foundation.json_file import renew, set_aside
from mlx_dspark.kernels.framework.edition import edition
from mlx_dspark.kernels.framework.kernel import Case, Kernel
from mlx_dspark.kernels.framework.verdict import Verdict
from mlx_dspark.kernels.race import processor_name

_DAY = 24 * 3600.0
GOOD_FOR = {"costly": 14 * _DAY, "slower": 14 * _DAY, "stalled": 60 * _DAY, "failed": 60 * _DAY}
"""Seconds after which a case of this state is tried again; others are not."""
SCHEMA = 2
"""Counts what a verdict is, and how it is found: those of another are found out anew."""
FILE = "kernels.json"
_PATIENCE = 10.0
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)

Verdicts = dict[Case, Verdict]


def device_name() -> str:
    """The device as MLX or the system names it."""
    return str(mx.device_info().get("device_name") or processor_name())


def machine_here() -> str:
    """What verdicts belong to, in words."""
    kind, system = mx.default_device().type.name, platform.mac_ver()[0]
    return f"{kind} {device_name()}{', macOS ' + system if system else ''}, MLX {version('mlx')}"


class VerdictStore:
    """The file in `folder`, for one machine. What cannot be written is not remembered, and said."""

    def __init__(self, folder: Path, machine: str | None = None, *, now: Callable[[], float] = time) -> None:
        self.file = folder / FILE
        self._now = now
        self.machine = machine if machine is not None else machine_here()

    def recall(self, kernel: Kernel) -> Verdicts:
        """What is known of this version of a kernel here. A damaged file is renamed to `*.damaged`."""
        try:
            known = self._machines().get(self.machine, {}).get(_key(kernel), {})
            return {_case(name): _verdict(raw) for name, raw in known.items() if self._good(raw)}
        except _DAMAGE:
            set_aside(self.file)
        except OSError:
            pass
        return {}

    def remember(self, kernel: Kernel, found: Mapping[Case, Verdict]) -> str:
        """Add verdicts; why they could not be kept, or an empty string."""

        def content() -> dict[str, Any]:
            self.recall(kernel)
            machines = self._readable()
            kept = machines.setdefault(self.machine, {}).setdefault(_key(kernel), {})
            at = self._now()
            kept.update({str(case): {**verdict.to_json(), "at": at} for case, verdict in found.items()})
            return {"schema": SCHEMA, "machines": machines}

        return renew(self.file, content, patience=_PATIENCE)

    def _good(self, raw: Mapping[str, Any]) -> bool:
        limit = GOOD_FOR.get(str(raw["state"]))
        return limit is None or 0 <= self._now() - float(raw["at"]) < limit

    def _readable(self) -> dict[str, Any]:
        try:
            return self._machines()
        except _DAMAGE:
            set_aside(self.file)
            return {}

    def _machines(self) -> dict[str, Any]:
        if not self.file.exists():
            return {}
        content = json.loads(self.file.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA or not isinstance(content["machines"], dict):
            raise ValueError(f"{self.file} is of another version")
        return content["machines"]


def _key(kernel: Kernel) -> str:
    return f"{kernel.name} {kernel.version} {edition(kernel, kernel.back_end)}"


def _verdict(raw: Mapping[str, Any]) -> Verdict:
    return Verdict.of({name: value for name, value in raw.items() if name != "at"})


def _case(name: str) -> Case:
    shape, _, width = name.rpartition(" x ")
    return Case(shape, int(width))
