"""Taking models out of the hub's cache. Nothing else is ever removed: other folders are the user's."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from mlx_dspark.catalog import default_model
from mlx_dspark.catalog.hub import is_hub_id
from mlx_dspark.catalog.pairs import target_of
from mlx_dspark.catalog.places import find_placed
from mlx_dspark.catalog.resolve import GGUF, hub_parts
from mlx_dspark.foundation.errors import BadCheckpoint, ModelNotFound, UsageError


@dataclass(frozen=True)
class Removal:
    """What is to be removed: `files` of the cache, or all of its folder `home`; `bytes` become free."""

    name: str
    home: Path
    files: tuple[Path, ...]
    bytes: int

    def execute(self) -> None:
        """Remove it. Raises BadCheckpoint where the system refuses."""
        try:
            for file in self.files:
                blob = file.resolve()
                file.unlink()
                if blob != file and blob.is_relative_to(self.home.resolve()) and not _linked(self.home, blob):
                    blob.unlink(missing_ok=True)
            if not self.files or not any(path.is_file() for path in (self.home / "snapshots").rglob("*")):
                shutil.rmtree(self.home)
        except OSError as error:
            raise BadCheckpoint(
                f"{error.filename or self.home} cannot be removed: {error.strerror or error}.",
                "Check its rights.",
            ) from error


def removal_of(name: str, *, cache_dir: Path) -> Removal:
    """What removing `name` takes away: a hub id, the id of a row of the registry for its target, or
    `gguf:owner/name/file.gguf` for one file with its parts.

    Raises ModelNotFound where the hub's cache has no such thing, and UsageError, which says where it lies,
    for what is not in that cache.
    """
    if name.startswith(GGUF):
        return _file_removal(name)
    if is_hub_id(name) and (home := _home(name)).is_dir():
        return Removal(name, home, (), _size(home))
    if (where := _elsewhere(name, cache_dir)) is not None:
        raise UsageError(
            f"{name} is not in the hub's cache, and only what is there is removed.",
            f"It is {where}: remove that yourself if nothing else uses it.",
        )
    if (target := target_of(name)) != name:
        return removal_of(target, cache_dir=cache_dir)
    raise _absent(name)


def _file_removal(name: str) -> Removal:
    parts = hub_parts(name.removeprefix(GGUF))
    if parts is None:
        raise ModelNotFound(
            f"{name} does not name a GGUF file of the hub.", "Write gguf:owner/repository/file.gguf."
        )
    repository, names = parts
    home = _home(repository)
    snapshots = sorted((home / "snapshots").glob("*"))
    files = [snapshot / each for snapshot in snapshots for each in names if (snapshot / each).is_file()]
    if not files:
        raise _absent(name)
    return Removal(name, home, tuple(files), sum(file.stat().st_size for file in files))


def _absent(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"The hub's cache has no {name}.", "`mlx-dspark models --local` lists what is on this machine."
    )


def _elsewhere(name: str, cache_dir: Path) -> Path | None:
    if name == default_model.NAME:
        home = cache_dir / name
        return home if home.is_dir() else None
    try:
        path = Path(name).expanduser()
        return path.absolute() if name and path.exists() else find_placed(name)
    except (OSError, RuntimeError, ValueError):
        return None


def _home(repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def _linked(home: Path, blob: Path) -> bool:
    """Whether a snapshot still has a link to the blob."""
    return any(path.resolve() == blob for path in (home / "snapshots").rglob("*") if path.is_symlink())


def _size(home: Path) -> int:
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink())
