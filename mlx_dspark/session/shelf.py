"""The models that are known, and those on this machine, with whether they fit. Asks no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_dspark.catalog.fit import SMALLEST_CONTEXT, Memory, Need, StateBytes, Verdict, verdict
from mlx_dspark.catalog.pair_row import TARGET, Expected
from mlx_dspark.catalog.pairs import Pair
from mlx_dspark.foundation.errors import DsparkError

if TYPE_CHECKING:
    from mlx_dspark.catalog.places import Found


@dataclass(frozen=True)
class Shelved:
    """A model in a list. `place` says where it was found, empty for nowhere; `bytes` are its weights' where
    it was not, 0 for not known; `fits` is None where that cannot be told; `trouble` says why it cannot be
    read."""

    name: str
    place: str
    path: Path | None
    bytes: int
    fits: Verdict | None
    drafters: Mapping[str, str]
    speedup: float | None = None
    source: str = ""
    trouble: str = ""
    speedups: Mapping[str, float] = field(default_factory=dict)
    expected: tuple[Expected, ...] = ()
    """Accept lengths that are recorded, of the drafter that is used unless another is asked for."""
    row: Mapping[str, Any] | None = None
    """What its row in the registry tells of memory and licences, and what it knows not; None without one."""
    licence: str = ""
    """Of that drafter, or of the model where lookup drafts; empty where it is not known."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON takes them."""
        told = None
        if self.fits is not None:
            told = {
                "fits": self.fits.fits,
                "context": self.fits.context,
                "declared_context": self.fits.declared,
                "smallest_bytes": self.fits.smallest,
                "whole_bytes": self.fits.whole,
                "memory_bytes": self.fits.have.bytes,
                "memory_source": self.fits.have.source,
            }
        return {
            "name": self.name,
            "installed": self.path is not None,
            "place": self.place or None,
            "path": None if self.path is None else str(self.path),
            "bytes": self.bytes or None,
            "fit": told,
            "drafters": dict(self.drafters),
            "speedup": self.speedup,
            "speedups": dict(self.speedups),
            "accept_lengths": [
                {
                    "mode": each.mode,
                    "content": each.content,
                    "cap": each.cap,
                    "mean": each.accept_length,
                    "basis": each.basis or None,
                }
                for each in self.expected
            ],
            "licence": self.licence or None,
            "row": None if self.row is None else dict(self.row),
            "source": self.source or None,
            "trouble": self.trouble or None,
        }


def known(pairs: Iterable[Pair], cache_dir: Path, have: Memory | None) -> Iterator[Shelved]:
    """Each model that a pair is known for, once."""
    models: dict[str, list[Pair]] = {}
    for pair in pairs:
        models.setdefault(pair.target, []).append(pair)
    for name, rows in models.items():
        drafters = {mode: drafter for row in rows for mode, drafter in row.drafters.items()}
        first = rows[0]
        gains = [row.speedup for row in rows if row.speedup is not None]
        place, path = installed(name, cache_dir)
        fits, size, trouble = _local_fit(path, have) if path is not None else (None, 0, "")
        yield Shelved(
            name,
            place,
            path,
            size or first.weights_bytes or 0,
            fits or _known_fit(first, have),
            drafters,
            max(gains, default=None),
            first.source,
            trouble,
            first.speedups,
            tuple(first.expectations(first.mode).values()),
            first.recorded(),
            first.licence.get(first.mode if first.mode in first.drafters else TARGET, ""),
        )


def on_this_machine(cache_dir: Path, have: Memory | None) -> Iterator[Shelved]:
    """Every model and drafter that is found on this machine, with its place."""
    from mlx_dspark.catalog import default_model
    from mlx_dspark.catalog.places import local_models

    place, path = installed(default_model.NAME, cache_dir)
    if path is not None and place == _OWN:
        fits, size, trouble = _local_fit(path, have)
        yield Shelved(default_model.NAME, place, path, size, fits, {}, trouble=trouble)
    for found in local_models():
        yield _shelved(found, have)


_OWN = "own cache"


def installed(name: str, cache_dir: Path) -> tuple[str, Path | None]:
    """The place and the path of a model on this machine; empty and None for one that is not."""
    from mlx_dspark.catalog import default_model
    from mlx_dspark.catalog.hub import cached_repository
    from mlx_dspark.catalog.places import find_placed

    if name == default_model.NAME:
        file = cache_dir / name / Path(default_model.WEIGHTS.member).name
        if file.is_file():
            return _OWN, file
        name = default_model.REPOSITORY
    if (cached := cached_repository(name)) is not None:
        return "hub cache", cached
    return ("local folder", placed) if (placed := find_placed(name)) is not None else ("", None)


def _shelved(found: Found, have: Memory | None) -> Shelved:
    fits, _, trouble = _local_fit(found.path, have)
    return Shelved(found.name, found.kind, found.path, found.bytes, fits, {}, trouble=trouble)


def _local_fit(path: Path, have: Memory | None) -> tuple[Verdict | None, int, str]:
    """Whether a model on this machine fits, the bytes of its weights, and what is wrong with it."""
    asked, declared, size, trouble = _asked(path, _state(path))
    fits = None if asked is None or have is None else verdict(asked, declared, have)
    return fits, size, trouble


def _state(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What changes when a file of a model does."""
    from mlx_dspark.catalog.gguf.names import shard_names

    try:
        parts = map(path.with_name, shard_names(path.name))
        files = sorted(path.iterdir()) if path.is_dir() else parts
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


@lru_cache(maxsize=256)
def _asked(path: Path, _: tuple[tuple[str, int, int, int], ...]) -> tuple[Need | None, int, int, str]:
    """What a model asks for, its context, the bytes of its weights, and what is wrong with it."""
    from mlx_dspark.catalog.folder import check_folder
    from mlx_dspark.catalog.resolve import resolve_model
    from mlx_dspark.session.fits import config_of, declared_context, dtype_of, need_or_weights, stored_bytes

    size = 0
    try:
        found = resolve_model(str(path), cache_dir=path)
        config = config_of(found)
        if found.packaging == "folder":
            check_folder(found.path)
        size = stored_bytes(found)
        need = need_or_weights(config, size, dtype=dtype_of(found))
        return need, declared_context(config), size, ""
    except DsparkError as error:
        return None, 0, size, error.sentence


def _known_fit(pair: Pair, have: Memory | None) -> Verdict | None:
    """Whether a model that is not here fits, as its row tells: its weights with the drafter's, or the most
    that was seen to be needed, and what a text takes."""
    weights = pair.weights_bytes or 0
    drafter = pair.drafter_bytes(pair.mode) if weights else 0
    known = max(weights, (pair.peak_bytes or 0) - drafter)
    if have is None or not known:
        return None
    states = StateBytes(fixed=pair.fixed_state_bytes or 0, per_token=pair.kv_bytes_per_token or 0)
    return verdict(Need(weights=known, states=states, drafter=drafter), SMALLEST_CONTEXT, have)
