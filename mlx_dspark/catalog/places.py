"""Where models lie on this machine: the folders of LM Studio and of MLX_DSPARK_MODEL_DIRS.

LM Studio keeps a model as `publisher/repository` below its models folder
(https://lmstudio.ai/docs/app/advanced/import-model). Its home is `~/.lmstudio`, or what the file
`~/.lmstudio-home-pointer` names, earlier `~/.cache/lm-studio`; `downloadsFolder` in the home's settings.json
names another models folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from mlx_dspark.catalog.folder import packed_models
from mlx_dspark.catalog.hub import cached_repositories, cached_repository
from mlx_dspark.foundation.errors import ModelNotFound
from mlx_dspark.foundation.paths import model_dirs, user_home

Kind = Literal["hub cache", "LM Studio", "MLX_DSPARK_MODEL_DIRS"]


@dataclass(frozen=True)
class Place:
    """A folder that holds models as `publisher/repository` or `repository`."""

    kind: Kind
    folder: Path


@dataclass(frozen=True)
class Found:
    """A model on this machine: a folder, or a GGUF file. `name` finds it where a model is to be named."""

    name: str
    path: Path
    kind: Kind

    @property
    def files(self) -> list[Path]:
        """Its files, those of a split GGUF model all."""
        return sorted(_files(self.path)) if self.path.is_dir() else _parts(self.path)

    @property
    def bytes(self) -> int:
        """What it takes on the disk."""
        return sum(_size(file) for file in self.files)


def not_folders() -> list[Path]:
    """What MLX_DSPARK_MODEL_DIRS names that is no folder."""
    return [folder for folder in model_dirs() if not _is_folder(folder)]


def places() -> list[Place]:
    """The folders that exist, MLX_DSPARK_MODEL_DIRS first; each is named once."""
    found = [Place("MLX_DSPARK_MODEL_DIRS", folder) for folder in model_dirs()]
    found += [Place("LM Studio", folder) for folder in lm_studio_folders()]
    seen: dict[str, Place] = {}
    for place in found:
        if _is_folder(place.folder):
            seen.setdefault(os.path.realpath(place.folder), place)
    return list(seen.values())


def lm_studio_folders() -> list[Path]:
    """LM Studio's folders of models, the one that its settings name first; they need not exist."""
    home = user_home()
    if home is None:
        return []
    pointed = _line(home / ".lmstudio-home-pointer")
    homes = [Path(pointed)] if pointed else []
    homes += [home / ".lmstudio", home / ".cache" / "lm-studio"]
    folders: list[Path] = []
    for each in homes:
        named = _downloads_folder(each / "settings.json")
        folders += [named] if named else []
        folders.append(each / "models")
    return list(dict.fromkeys(folders))


def find_placed(name: str) -> Path | None:
    """The folder of a model named `publisher/repository` or `repository` in one of the places, or None.

    Raises ModelNotFound for a bare name that several models have.
    """
    steps = name.split("/")
    if len(steps) > 2 or not all(steps) or {".", ".."} & set(steps) or "\\" in name or "\0" in name:
        return None
    if len(steps) == 1:
        return _called(name)
    for place in places():
        beside = place.folder / steps[1] if place.kind == "MLX_DSPARK_MODEL_DIRS" else None
        for each in (place.folder / name, beside):
            if each is not None and holds_model(each):
                return each
    return None


def _called(name: str) -> Path | None:
    found = {
        os.path.realpath(path): path
        for place in places()
        for path in _candidates(place.folder)
        if path.name == name and holds_model(path)
    }
    if len(found) > 1:
        raise ModelNotFound(
            f"Several models are called {name!r}: {' and '.join(map(str, found.values()))}.",
            "Name one by its folder.",
            field="model",
        )
    return next(iter(found.values()), None)


def holds_model(folder: Path) -> bool:
    """Whether the folder has a config and weights, or a GGUF model."""
    try:
        whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        return whole or (folder.is_dir() and bool(packed_models(folder)))
    except (OSError, ValueError):
        return False


def local_models() -> Iterator[Found]:
    """Every model found on this machine, in the hub's cache first; no file of it is read."""
    for name in cached_repositories():
        if (folder := cached_repository(name)) is not None:
            yield Found(name, folder, "hub cache")
        else:
            yield from _cached_files(name)
    for place in places():
        for folder in _candidates(place.folder):
            if holds_model(folder):
                yield from _placed(place, folder)


def _placed(place: Place, folder: Path) -> Iterator[Found]:
    name = "/".join(folder.relative_to(place.folder).parts)
    if (folder / "config.json").is_file():
        yield Found(name, folder, place.kind)
        return
    packed = packed_models(folder)
    for file in packed:
        yield Found(name if len(packed) == 1 else str(file), file, place.kind)


def _cached_files(repository: str) -> Iterator[Found]:
    """The GGUF files of a repository in the hub's cache."""
    home = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots"
    for snapshot in sorted(home.glob("*")):
        for file in packed_models(snapshot):
            yield Found(f"gguf:{repository}/{file.name}", file, "hub cache")


def _candidates(folder: Path) -> list[Path]:
    """Folders one and two levels down, sorted; links are followed once."""
    found: list[Path] = []
    for outer in _subfolders(folder):
        found.append(outer)
        if not holds_model(outer):
            found += _subfolders(outer)
    return found


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
    except (OSError, ValueError):
        return ""
    return lines[0].strip() if lines else ""


def _downloads_folder(settings: Path) -> Path | None:
    try:
        told = json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    named = told.get("downloadsFolder") if isinstance(told, dict) else None
    return Path(named) if isinstance(named, str) and named and "\0" not in named else None


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from (file for file in folder.rglob("*") if file.is_file())
    except OSError:
        return


def _parts(file: Path) -> list[Path]:
    from mlx_dspark.catalog.gguf.names import shard_names

    return [part for name in shard_names(file.name) if (part := file.with_name(name)).is_file()]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def is_in_hub_cache(path: Path) -> bool:
    """Whether a path lies in the hub's cache."""
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(constants.HF_HUB_CACHE))
