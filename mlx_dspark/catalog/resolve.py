"""From the name a user typed to files on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mlx_dspark.catalog import default_model
from mlx_dspark.catalog.folder import packed_models
from mlx_dspark.catalog.gguf.names import model_name, shard_names
from mlx_dspark.catalog.hub import (
    cached_repositories,
    cached_repository,
    fetch_files,
    fetch_repository,
    is_hub_id,
    is_offline,
)
from mlx_dspark.catalog.pairs import SHIPPED, registry, target_of
from mlx_dspark.catalog.places import find_placed
from mlx_dspark.catalog.progress import Progress, silent
from mlx_dspark.catalog.reading import reading
from mlx_dspark.foundation.errors import BadCheckpoint, DownloadError, ModelNotFound
from mlx_dspark.foundation.numbers import brief

GGUF = "gguf:"
"""Leads the name of one file of the hub."""


@dataclass(frozen=True)
class ModelRef:
    """A model found on this machine: what it is called, where it lies and where it came from.

    `sha256` is that of its one file where finding it included checking that, else None. `placed_as` is the
    `publisher/repository` that it lies under in a folder of `catalog.places`, None elsewhere.
    """

    name: str
    path: Path
    packaging: Literal["gguf", "folder"]
    source: str
    trust_remote_code: bool = False
    sha256: str | None = None
    placed_as: str | None = None


def resolve_model(
    name: str | None,
    *,
    cache_dir: Path,
    offline: bool | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    accept: Callable[[dict[str, Any]], None] | None = None,
    weigh: Callable[[dict[str, Any], int], None] | None = None,
) -> ModelRef:
    """Find, and where needed fetch, a model.

    `name` is None or `smollm2-135m` for the default model, an existing folder, an existing `.gguf` file,
    the id of a row of the registry for its target, a hub id `owner/name`, or `gguf:owner/name/file.gguf`
    for one such file of the hub. A hub id is looked for in the hub's cache, then in the folders of
    `catalog.places`, and fetched last; these folders are also searched for a bare name. A folder without
    config.json that holds one GGUF model stands for it, and any part of a split one for all parts.
    `offline` None: as the environment says (HF_HUB_OFFLINE). The content is checked when it is loaded; of a
    hub repository that must be fetched, `accept` sees the config before the weights are, `weigh` the
    config, empty for a file, and the bytes of the weights; both may raise. Raises ModelNotFound,
    DownloadError, BadCheckpoint or RemoteCodeRefused, this too before the weights of a hub repository are
    fetched.
    """
    offline = is_offline() if offline is None else offline
    if name is None or name == default_model.NAME:
        path = default_model.default_model(cache_dir, offline=offline, progress=progress)
        if path.is_dir():
            return ModelRef(default_model.NAME, path, "folder", default_model.REPOSITORY)
        weights = default_model.WEIGHTS
        return ModelRef(default_model.NAME, path, "gguf", weights.requirement, sha256=weights.sha256)
    path = _path(name)
    if _kind(name, path) == "absent":
        name = target_of(name)
    match _kind(name, path):
        case "folder":
            return _folder(path, trust_remote_code)
        case "file":
            return _file(name, path)
    if name.startswith(GGUF):
        return _hub_file(name, offline, progress, weigh)
    if (placed := _placed(name)) is not None:
        under = tuple(name.split("/"))
        known = name if len(under) == 2 and placed.parts[-2:] == under else None
        return replace(_folder(placed, trust_remote_code), placed_as=known)
    if is_hub_id(name):
        folder = fetch_repository(
            name,
            offline=offline,
            trust_remote_code=trust_remote_code,
            progress=progress,
            accept=accept,
            weigh=weigh,
        )
        return ModelRef(name, folder, "folder", name, trust_remote_code)
    raise ModelNotFound(
        f"There is no model {brief(name)}: neither a folder, a .gguf file nor a hub id.",
        _hub_file_hint(name) or f"Name a model folder or a hub id such as {default_model.REPOSITORY}.",
        near=_hub_file_hint(name) or _near(name),
    )


def resolve_drafter(name: str, *, offline: bool | None = None, progress: Progress = silent) -> ModelRef:
    """Find, and where needed fetch, a drafter: an existing folder or GGUF file, a hub id `owner/name`,
    `gguf:owner/name/file.gguf` for one such file of the hub, or `shipped:name` or just the name for one that
    comes with the program.

    Python code in it is no reason to refuse it, since none of it is run. The content is checked when it is
    loaded. Raises ModelNotFound, DownloadError, BadCheckpoint or UnsupportedModel.
    """
    if (comes_along := _shipped(name)) is not None:
        return ModelRef(f"{SHIPPED}{comes_along.name}", comes_along, "folder", f"{SHIPPED}{comes_along.name}")
    offline = is_offline() if offline is None else offline
    path = _path(name)
    if _kind(name, path) != "absent":
        _refuse_unfinished(path)
        return ModelRef(path.resolve().name, path.resolve(), "folder", str(path))
    if name.startswith(GGUF):
        return _hub_file(name, offline, progress, None)
    if (placed := _placed(name)) is not None:
        return ModelRef(placed.name, placed.resolve(), "folder", str(placed))
    if is_hub_id(name):
        folder = fetch_repository(
            name, offline=offline, trust_remote_code=True, progress=progress, what="drafter"
        )
        return ModelRef(name, folder, "folder", name)
    raise ModelNotFound(
        f"There is no drafter {brief(name)}: neither a folder, a .gguf file nor a hub id.",
        _hub_file_hint(name) or "Name the folder or the hub id of a DSpark or DFlash drafter.",
        field="drafter",
        near=_hub_file_hint(name) or _near(name, ()),
    )


def _refuse_unfinished(path: Path) -> None:
    """Raises BadCheckpoint for the folder of a training run that has not come to its end."""
    if (path / "run" / "checkpoints").is_dir() and not (path / "config.json").exists():
        raise BadCheckpoint(
            f"The training run in {path} is unfinished: it has written no drafter yet.",
            "Give its train command again; it goes on where it was stopped.",
            field="drafter",
        )


def _shipped(name: str) -> Path | None:
    """The folder of the drafter of that name that comes with the program; None where there is none."""
    from mlx_dspark.catalog.shipped import drafter_named

    return drafter_named(name.removeprefix(SHIPPED))


def _placed(name: str) -> Path | None:
    """The folder of that name in one of the places for models, unless the hub's cache has it whole."""
    cached = is_hub_id(name) and cached_repository(name) is not None
    return None if cached else find_placed(name)


def _path(name: str) -> Path:
    """`name` as a path, the home of an unknown user left as it is written."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _kind(name: str, path: Path) -> Literal["folder", "file", "absent"]:
    try:
        with reading(path):
            return "folder" if name and path.is_dir() else "file" if path.is_file() else "absent"
    except BadCheckpoint as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        return "absent"  # a name longer than the file system allows


def _folder(path: Path, trust_remote_code: bool) -> ModelRef:
    with reading(path):
        models = [] if (path / "config.json").exists() else packed_models(path)
    if len(models) == 1:
        return _file(str(models[0]), models[0])
    return ModelRef(path.resolve().name, path.resolve(), "folder", str(path), trust_remote_code)


def _hub_file(
    name: str, offline: bool, progress: Progress, weigh: Callable[[dict[str, Any], int], None] | None
) -> ModelRef:
    """The file, with all its parts, that `gguf:owner/name/file.gguf` names."""
    called = name.removeprefix(GGUF)
    path = _path(called)
    local = "" if _kind(called, path) == "absent" else f"It is on this machine: leave {GGUF} out."
    parts = hub_parts(called)
    if parts is None:
        raise ModelNotFound(
            f"{brief(name)} does not name a GGUF file of the hub.",
            local
            or "Write gguf:owner/repository/file.gguf, with the file's name as on the repository's page; "
            "a file of this machine is named without gguf:.",
        )
    repository, names = parts
    try:
        fetched = fetch_files(
            repository,
            names,
            offline=offline,
            progress=progress,
            weigh=None if weigh is None else partial(weigh, {}),
        )
    except (ModelNotFound, DownloadError) as error:
        if not local:
            raise
        raise type(error)(error.sentence, local) from error
    return ModelRef(model_name(fetched), fetched, "gguf", name)


def hub_parts(called: str) -> tuple[str, list[str]] | None:
    """Repository and file, with all its parts, of `owner/name/file.gguf`; None where it is not that."""
    owner, _, rest = called.partition("/")
    repository, _, file = rest.partition("/")
    steps = file.split("/")
    is_file = file.lower().endswith(".gguf") and not {"", ".", ".."} & set(steps) and "\\" not in file
    if not is_hub_id(f"{owner}/{repository}") or not is_file:
        return None
    folder = "/".join(steps[:-1])
    return f"{owner}/{repository}", [
        f"{folder}/{part}" if folder else part for part in shard_names(steps[-1])
    ]


def _hub_file_hint(name: str) -> str:
    """What to write where `name` may be meant as a GGUF file of the hub."""
    return f"If it is a file of the hub, write {GGUF}{name}" if hub_parts(name) is not None else ""


def _file(name: str, path: Path) -> ModelRef:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound(f"{name} is a file, and not a .gguf file.", "Name its folder, or a .gguf file.")
    return ModelRef(model_name(path), path.absolute(), "gguf", str(path))


def _near(name: str, short_names: Collection[str] | None = None) -> str:
    """The nearest of the short names, the cached repositories and the neighbours of a mistyped path.

    Of paths their last parts are compared: what leads there is the same.
    """
    if short_names is None:
        short_names = [pair.id for pair in registry()]
    known = {known: known for known in (*short_names, *cached_repositories())}
    known |= {known.split("/")[1]: known for known in list(known) if "/" in known}
    near = [known[match] for match in get_close_matches(name, known, n=3, cutoff=0.6)]
    path = _path(name)
    if "://" not in name and os.access(path.parent, os.R_OK | os.X_OK) and path.parent.is_dir():
        beside = [entry.name for entry in path.parent.iterdir() if _may_be_model(entry)]
        near += [str(path.parent / match) for match in get_close_matches(path.name, beside, n=3, cutoff=0.7)]
    near = [other for other in dict.fromkeys(near) if other not in (name, str(path))]
    return f"Did you mean {' or '.join(near)}?" if near else ""


def _may_be_model(path: Path) -> bool:
    """Whether it is a folder, or a file that could be a model."""
    try:
        return path.is_dir() or path.suffix.lower() == ".gguf"
    except OSError:
        return False
