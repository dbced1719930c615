"""From the name a user typed to files on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from mlx_dspark.catalog import default_model
from mlx_dspark.catalog.hub import cached_repositories, fetch_repository, is_hub_id
from mlx_dspark.catalog.progress import Progress, silent
from mlx_dspark.foundation.errors import ModelNotFound


@dataclass(frozen=True)
class ModelRef:
    """A model found on this machine: what it is called, where it lies and where it came from."""

    name: str
    path: Path
    packaging: Literal["gguf", "folder"]
    source: str
    trust_remote_code: bool = False


def resolve_model(
    name: str | None,
    *,
    cache_dir: Path,
    offline: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> ModelRef:
    """Find, and where needed fetch, a model.

    `name` is None or `smollm2-135m` for the default model, an existing folder, an existing `.gguf` file, or a
    hub id `owner/name`. The content is checked when it is loaded. Raises ModelNotFound, DownloadError,
    RemoteCodeRefused (before the weights of a hub repository are fetched) or BadCheckpoint.
    """
    if name is None or name == default_model.NAME:
        path = default_model.default_model(cache_dir, offline=offline, progress=progress)
        source = default_model.REPOSITORY if path.is_dir() else default_model.WEIGHTS.requirement
        return ModelRef(default_model.NAME, path, "folder" if path.is_dir() else "gguf", source)
    path = Path(name).expanduser()
    match _kind(name, path):
        case "folder":
            return ModelRef(path.resolve().name, path.resolve(), "folder", str(path), trust_remote_code)
        case "file":
            return _file(name, path)
    if is_hub_id(name):
        folder = fetch_repository(
            name, offline=offline, trust_remote_code=trust_remote_code, progress=progress
        )
        return ModelRef(name, folder, "folder", name, trust_remote_code)
    raise ModelNotFound(
        f"There is no model {name!r}: neither a folder, a .gguf file nor a hub id.", _hint(name)
    )


def _kind(name: str, path: Path) -> Literal["folder", "file", "absent"]:
    try:
        return "folder" if name and path.is_dir() else "file" if path.is_file() else "absent"
    except OSError:  # a name longer than the file system allows
        return "absent"


def _file(name: str, path: Path) -> ModelRef:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound(f"{name} is a file, and not a .gguf file.", "Name its folder, or a .gguf file.")
    return ModelRef(path.stem, path.resolve(), "gguf", str(path))


def _hint(name: str) -> str:
    """The nearest known names: the default model, cached hub models, and neighbours of a mistyped path."""
    known = {default_model.NAME: default_model.NAME} | {known: known for known in cached_repositories()}
    known |= {known.split("/")[1]: known for known in list(known) if "/" in known}
    parent = Path(name).expanduser().parent
    if "://" not in name and parent.is_dir():
        known |= {str(parent / entry.name): str(parent / entry.name) for entry in parent.iterdir()}
    near = list(dict.fromkeys(known[match] for match in get_close_matches(name, known, n=3, cutoff=0.6)))
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Name a model folder or a hub id such as {default_model.REPOSITORY}."
