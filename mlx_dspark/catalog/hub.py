"""Model folders from the Hugging Face hub: the local cache first, then the network."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from mlx_dspark.catalog.downloads import HubFile, SilentBar, download, hub_files
from mlx_dspark.catalog.folder import read_config, refuse_remote_code, weight_files
from mlx_dspark.catalog.progress import LoadProgress, Progress
from mlx_dspark.catalog.reading import reading
from mlx_dspark.compat.hub import HUB_ERRORS
from mlx_dspark.foundation.errors import BadCheckpoint, DownloadError, ModelNotFound

_DESCRIPTIONS = ["README.md", "*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "*.tiktoken", "*.py"]
_WEIGHTS = ["model*.safetensors"]
_PREFIXES = re.compile(r"^((Got: |[\w.]*(Error|Exception|Timeout)(: ?|$))|\[Errno -?\d+\] )*")
_GGUF = "gguf:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""The numbers of the OSErrors of a disk, or a share of it, that is full."""


def is_offline() -> bool:
    """Whether the environment (HF_HUB_OFFLINE) keeps the program from the network."""
    return bool(constants.HF_HUB_OFFLINE)


def is_hub_id(name: str) -> bool:
    """Whether `name` reads `owner/repository`."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def fetch_repository(
    repository: str,
    *,
    offline: bool,
    trust_remote_code: bool,
    progress: Progress,
    what: str = "model",
    accept: Callable[[dict[str, Any]], None] | None = None,
    weigh: Callable[[dict[str, Any], int], None] | None = None,
) -> Path:
    """The folder of a hub repository, fetched unless the cache holds it whole.

    The small files come first: before the weights are fetched, a repository with Python code is refused, the
    disk is asked for room, and `accept` sees its config, `weigh` that and the bytes of its weights; both may
    raise. `what` it is called in messages. Raises ModelNotFound,
    DownloadError, RemoteCodeRefused or BadCheckpoint.
    """
    if (cached := cached_repository(repository)) is not None:
        return cached
    if offline:
        raise _absent_offline(what, repository)
    progress(LoadProgress(f"fetching the {what} {repository} from the hub"))
    with _fetching(what, repository):
        folder = _snapshot(repository, _DESCRIPTIONS)
        if what == "model" and not (folder / "config.json").exists():
            raise BadCheckpoint(
                f"The hub's repository {repository} has no config.json.",
                f"If it holds GGUF files, name one of them: gguf:{repository}/FILE.gguf.",
            )
        if not trust_remote_code:
            refuse_remote_code(folder, read_config(folder))
        if accept is not None:
            accept(read_config(folder))
        files, commit = hub_files(repository, _WEIGHTS)
        if weigh is not None and (size := sum(file.size for file in files)):
            weigh(read_config(folder), size)
        download(repository, files, f"the {what} {repository}", progress, revision=commit)
        return _snapshot(repository, _DESCRIPTIONS + _WEIGHTS)


def _snapshot(repository: str, patterns: list[str]) -> Path:
    return Path(snapshot_download(repository, allow_patterns=patterns, tqdm_class=SilentBar))


def fetch_files(
    repository: str,
    names: list[str],
    *,
    offline: bool,
    progress: Progress,
    weigh: Callable[[int], None] | None = None,
) -> Path:
    """Files of a hub repository, each fetched unless the cache holds it; returns the first one's path.

    The hub is asked once about each before any is fetched, since the download asks again and again where
    nobody answers; `weigh` sees the bytes of those that are missing, and may raise. Raises ModelNotFound when
    there is no such repository or file, or DownloadError.
    """
    held = {name: _cached_file(repository, name) for name in names}
    missing = [name for name, path in held.items() if path is None]
    if missing and offline:
        called = f"{repository}/{missing[0]}"
        raise _absent_offline("file", called, pulled=f"{_GGUF}{called}")
    files = [_asked(repository, name, progress) for name in missing]
    if files and weigh is not None:
        weigh(sum(file.size for file in files))
    if files:
        with _fetching("model", repository):
            download(repository, files, f"{repository}/{files[0].name}", progress)
    for file in files:
        with _fetching("model", repository, file.name):
            held[file.name] = Path(hf_hub_download(repository, file.name))
    first = held[names[0]]
    assert first is not None, "what was missing is here now"
    return first


def _asked(repository: str, name: str, progress: Progress) -> HubFile:
    """What the hub tells about a file."""
    progress(LoadProgress(f"fetching {repository}/{name} from the hub"))
    with _fetching("model", repository, name):
        told = get_hf_file_metadata(hf_hub_url(repository, name))
    return HubFile(name, told.size or 0, told.etag)


def _cached_file(repository: str, name: str) -> Path | None:
    with reading(Path(constants.HF_HUB_CACHE)):
        try:
            return Path(hf_hub_download(repository, name, local_files_only=True))
        except LocalEntryNotFoundError:
            return None


def _absent_offline(what: str, name: str, *, pulled: str = "") -> DownloadError:
    return DownloadError(
        f"The {what} {name} is not in the local cache, and the program is offline.",
        f"Fetch it once while online (`mlx-dspark pull {pulled or name}`), or name a local "
        f"{'file' if what == 'file' else 'folder'}; `mlx-dspark models --local` lists what is here.",
    )


@contextmanager
def _fetching(what: str, repository: str, file: str = "") -> Iterator[None]:
    """What goes wrong while a repository, or one file of it, is fetched, as an error that names it."""
    try:
        yield
    except GatedRepoError as error:
        raise DownloadError(
            f"The {what} {repository} asks for consent to its terms.",
            "Accept them on its page, then run `hf auth login`.",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"The hub has no {what} {repository}, or it is private.",
            "Check the name, or run `hf auth login`.",
        ) from error
    except HUB_ERRORS as error:
        if file and isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ModelNotFound(
                f"The hub's repository {repository} has no file {file}.",
                "Check the name on the repository's page.",
            ) from error
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise DownloadError(
                f"The disk is full: the {what} {repository} cannot be stored in {constants.HF_HUB_CACHE}.",
                "Make room, or set HF_HOME to a folder on another disk.",
            ) from error
        raise DownloadError(
            f"The {what} {repository} could not be fetched from the hub: {_reason(error)}.",
            "Check the connection, or name a local folder.",
        ) from error


def cached_repository(repository: str) -> Path | None:
    """The cached folder of a hub repository when no file is missing from it; asks no network."""
    try:
        with reading(Path(constants.HF_HUB_CACHE)):
            folder = Path(
                snapshot_download(repository, allow_patterns=_DESCRIPTIONS + _WEIGHTS, local_files_only=True)
            )
            read_config(folder)
            weight_files(folder)
    except (LocalEntryNotFoundError, BadCheckpoint):
        return None
    return folder


def described_repository(repository: str) -> Path:
    """The cached folder of a hub repository whose small files were fetched, with or without its weights."""
    return Path(snapshot_download(repository, allow_patterns=_DESCRIPTIONS, local_files_only=True))


def cached_repositories() -> list[str]:
    """The hub ids of the models in the local cache, sorted."""
    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)


def _reason(error: Exception) -> str:
    """What went wrong, without the names of the libraries' exception classes."""
    line = str(error).partition("\n")[0].rstrip(".")
    return _PREFIXES.sub("", line) or "the connection failed"
