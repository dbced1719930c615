"""Which way of holding weights is fastest on this machine: a short race on samples of the model, remembered.

It compares whole-model estimates at three widths. A damaged memory is set aside and measured anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dspark.foundation.json_file import renew, set_aside
from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.threads import usable_cores

VERSION = 1
PREFILL_WIDTH = 32
_REPEATS = 3
_COPIES = 4
_HOPELESS = 4
_SAMPLE_WEIGHTS = 1 << 21
_OUTPUTS_MULTIPLE = 64

Multiply = Callable[[np.ndarray], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds that all of a model's matrices take together, at widths 1, 8 and PREFILL_WIDTH."""

    name: str
    plain_ms: float
    verify_ms: float
    prefill_ms: float

    @property
    def score(self) -> float:
        """A plain step and a verified one weigh the same: the geometric mean."""
        return (self.plain_ms * self.verify_ms) ** 0.5


@dataclass(frozen=True)
class Wrong:
    """A way that did not race, and what it computes wrong on this machine."""

    name: str
    wrong: str


Raced = Timing | Wrong


def fastest(timings: Sequence[Timing], home: str) -> str:
    """The name of the best timing; `home`, the way without tricks, unless beaten by a tenth."""
    best = min(timings, key=lambda timing: timing.score)
    at_home = next(timing for timing in timings if timing.name == home)
    return best.name if best.score < 0.9 * at_home.score else home


# -- measuring ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sampled:
    source: Source
    times: float  # how often the whole model holds as many weights of this kind


def measure(sources: Sequence[Source], ways: Mapping[str, Callable[[Source], Multiply]]) -> list[Timing]:
    """Race the ways over samples of `sources`; each way makes a function [rows, inputs] -> product."""
    samples = _samples(sources)
    held = {name: [hold(sample.source) for sample in samples] for name, hold in ways.items()}
    widths = {"plain_ms": 1, "verify_ms": 8, "prefill_ms": PREFILL_WIDTH}
    best: dict[tuple[str, str], float] = defaultdict(lambda: float("inf"))
    for repeat in range(_REPEATS):
        for name in _in_the_running(list(held), best):
            matrices = held[name]
            for field, width in widths.items():
                if width == PREFILL_WIDTH and repeat:
                    continue
                best[name, field] = min(best[name, field], _pass_ms(samples, matrices, width))
    return [Timing(name, **{field: best[name, field] for field in widths}) for name in held]


def _in_the_running(names: Sequence[str], best: Mapping[tuple[str, str], float]) -> list[str]:
    """The ways to time again: all but those far behind another at both widths of the score."""

    def behind(name: str, other: str) -> bool:
        fields = ("plain_ms", "verify_ms")
        return all(best.get((name, field), 0) > _HOPELESS * best.get((other, field), 0) for field in fields)

    return [name for name in names if not any(behind(name, other) for other in names)]


def _samples(sources: Sequence[Source]) -> list[_Sampled]:
    """A few matrices of every kind, the large ones cut to their first outputs."""
    by_kind: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        by_kind[source.kind].append(source)
    samples = []
    for alike in by_kind.values():
        chosen = [cut(source) for source in alike[:: max(1, len(alike) // _COPIES)][:_COPIES]]
        times = sum(source.weights for source in alike) / sum(source.weights for source in chosen)
        samples += [_Sampled(source, times) for source in chosen]
    return samples


def cut(source: Source, weights: int = _SAMPLE_WEIGHTS) -> Source:
    """The first outputs of a matrix, about so many weights, at least 64 outputs; or the matrix itself."""
    wanted = weights // source.inputs
    outputs = max(_OUTPUTS_MULTIPLE, wanted - wanted % _OUTPUTS_MULTIPLE)
    if outputs >= source.outputs:
        return source
    parts = {"weight": source.weight, "scales": source.scales, "biases": source.biases}
    cut = {name: mx.contiguous(part[:outputs]) for name, part in parts.items() if part is not None}
    mx.eval(list(cut.values()))
    return replace(source, outputs=outputs, **cut)


def _pass_ms(samples: Sequence[_Sampled], matrices: Sequence[Multiply], width: int) -> float:
    total = 0.0
    noise = np.random.default_rng(0)
    for sample, multiply in zip(samples, matrices, strict=True):
        rows = noise.standard_normal((width, sample.source.inputs)).astype(np.float32)
        started = time.perf_counter()
        multiply(rows)
        total += (time.perf_counter() - started) * sample.times
    return total * 1e3


# -- remembering -------------------------------------------------------------------------------------------


def race_key(sources: Sequence[Source], versions: Mapping[str, int]) -> str:
    """Names this machine, these libraries, the ways with their versions, and a model of these matrices."""
    counts: dict[str, int] = defaultdict(int)
    for source in sources:
        counts[source.kind] += 1
    facts = {
        "device": str(mx.default_device()),
        "processor": processor_name(),
        "cores": usable_cores(),
        "mlx": version("mlx"),
        "numpy": np.__version__,
        "race": VERSION,
        "ways": sorted(versions.items()),
        "matrices": sorted(counts.items()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def processor_name() -> str:
    """The processor's model as the system tells it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What reading a file raises that is not a memory of timings."""


class RaceMemory:
    """Timings, and ways that were wrong, by race key in one JSON file, written whole and put in place."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "cpu-weights.json"

    def recall(self, key: str, names: Collection[str]) -> list[Raced] | None:
        """The timings of the ways `names` remembered for `key`.

        A file that does not hold what it should is renamed to `*.damaged`; one that cannot be read is none.
        """
        try:
            if not self._file.exists():
                return None
            entry = self._entries().get(key)
            if entry is not None and {timing.name for timing in entry} != set(names):
                raise ValueError(f"the entry {key} is not of {', '.join(names)}")
            return entry
        except _DAMAGE:
            set_aside(self._file)
            return None
        except OSError:
            return None

    def remember(self, key: str, timings: Sequence[Raced]) -> str:
        """Keep the timings of a model; why they could not be kept, or an empty string."""
        try:
            return renew(self._file, lambda: self._content_with(key, timings))
        except _DAMAGE as error:
            return f"{self._file} cannot be written: {error}"

    def _content_with(self, key: str, timings: Sequence[Raced]) -> dict[str, list[dict[str, Any]]]:
        self.recall(key, [timing.name for timing in timings])
        entries = self._entries() if self._file.exists() else {}
        entries[key] = list(timings)
        return {name: [asdict(timing) for timing in entry] for name, entry in entries.items()}

    def _entries(self) -> dict[str, list[Raced]]:
        content = json.loads(self._file.read_text())
        return {key: [_raced(raw) for raw in entry] for key, entry in content.items()}


def _raced(raw: dict[str, Any]) -> Raced:
    if "wrong" in raw:
        return Wrong(str(raw["name"]), str(raw["wrong"]))
    numbers = {name: float(value) for name, value in raw.items() if name != "name"}
    if not all(0 < number < math.inf for number in numbers.values()):
        raise ValueError(f"the timing {raw} is not of times above 0")
    return Timing(str(raw["name"]), **numbers)
