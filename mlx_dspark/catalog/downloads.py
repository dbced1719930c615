"""Files of the hub on their way here: how much is missing, whether the disk holds it, and how fast it comes.

What has come of a file lies beside the cache's blobs until all of it is there; the hub's own client then
finds the blob, and only links it.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import repo_folder_name
from tqdm.asyncio import tqdm_asyncio

from mlx_dspark.catalog.fit import gigabytes
from mlx_dspark.catalog.integrity import sha256_of
from mlx_dspark.catalog.progress import LoadProgress, Progress
from mlx_dspark.compat.hub import resumed_get
from mlx_dspark.foundation.errors import DownloadError

_SPARE = 256 << 20
"""Bytes of the disk that are left to others."""
_SPAN = 10.0
"""The rate is that of so many newest seconds."""
_EVERY = 0.1
_SHA256 = 64
_PART = ".mlx_dspark.incomplete"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; `size` in bytes, 0 where the hub does not tell; `blob` is its name in the
    cache, None where that is not known."""

    name: str
    size: int
    blob: str | None


def hub_files(repository: str, patterns: list[str]) -> tuple[list[HubFile], str | None]:
    """The files of a repository that match, and its commit, by one question to the hub.

    Raises what the hub's client raises.
    """
    told = HfApi(endpoint=constants.ENDPOINT).model_info(
        repository, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    files = [
        HubFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else each.blob_id)
        for each in told.siblings or ()
        if any(fnmatch(each.rfilename, pattern) for pattern in patterns)
    ]
    return files, told.sha


def missing_bytes(repository: str, file: HubFile) -> int:
    """Bytes of a file that are not in the cache, those of an earlier download that was cut off left out."""
    if file.blob is None:
        return file.size
    if _blob(repository, file.blob).exists():
        return 0
    try:
        return max(0, file.size - _part(repository, file.blob).stat().st_size)
    except OSError:
        return file.size


def refuse_full_disk(what: str, missing: int) -> None:
    """Raises DownloadError where the cache's disk has no room for so many bytes."""
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if missing and missing + _SPARE > free:
        raise DownloadError(
            f"The disk has no room for {what}: {gigabytes(missing)} are missing, and {gigabytes(free)} are "
            f"free where {constants.HF_HUB_CACHE} lies.",
            "Make room, or set HF_HOME to a folder on another disk.",
        )


def download(
    repository: str, files: list[HubFile], what: str, progress: Progress, *, revision: str | None = None
) -> None:
    """Fetch what is missing of files into the cache's blobs, one after the other in this thread.

    The disk is asked before the first byte. What came before a failure, or Ctrl-C, is kept, and a later call
    goes on from there. Raises DownloadError, and what the hub's client raises.
    """
    missing = sum(missing_bytes(repository, file) for file in files)
    refuse_full_disk(what, missing)
    meter = Meter(what, missing, progress)
    for file in files:
        if missing_bytes(repository, file) or not file.size:
            _fetch(repository, file, meter, revision)


def _fetch(repository: str, file: HubFile, meter: Meter, revision: str | None) -> None:
    if file.blob is None:
        hf_hub_download(repository, file.name, revision=revision, tqdm_class=meter.bar())
        return
    blob, part = _blob(repository, file.blob), _part(repository, file.blob)
    part.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{part}.lock"):
        if blob.exists():
            return
        if file.size and part.exists() and part.stat().st_size > file.size:
            part.unlink()
        url = hf_hub_url(repository, file.name, revision=revision)
        resumed_get(url, part, size=file.size or None, bar=meter.bar())
        if len(file.blob) == _SHA256 and sha256_of(part) != file.blob:
            part.unlink()
            raise DownloadError(
                f"{repository}/{file.name} did not arrive as the hub has it: its sha256 is another.",
                "Fetch it again.",
            )
        part.replace(blob)
    Path(f"{part}.lock").unlink(missing_ok=True)


class SilentBar(tqdm_asyncio):  # pyright: ignore[reportMissingTypeArgument]
    """A progress bar for the hub's client that shows nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(total=0, disable=True)


class Meter:
    """Tells how much of `total` bytes is here, how fast the rest comes and how long that takes.

    A total of 0 is not known.
    """

    def __init__(
        self, what: str, total: int, progress: Progress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._total = total
        self._progress = progress
        self._clock = clock
        self._done = 0
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._told = 0.0

    def add(self, count: int) -> None:
        """So many more bytes are here; below 0 where some are fetched again."""
        self._done = max(0, self._done + count)
        now = self._clock()
        self._seen.append((now, self._done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _SPAN:
            self._seen.popleft()
        if now - self._told >= _EVERY or self._done >= self._total:
            self._told = now
            self._tell()

    def line(self) -> str:
        """As `1.2 GB of 4.7 GB, 35 MB/s, 1 min 40 s left`."""
        (begin, before), (end, now) = self._seen[0], self._seen[-1]
        rate = max(0, now - before) / (end - begin) if end > begin else 0.0
        parts = [gigabytes(self._done)]
        if self._total:
            parts = [f"{gigabytes(self._done)} of {gigabytes(self._total)}"]
        if rate:
            parts.append(f"{gigabytes(int(rate))}/s")
            if self._total > self._done:
                parts.append(f"{_duration((self._total - self._done) / rate)} left")
        return ", ".join(parts)

    def bar(self) -> type[SilentBar]:
        """A progress bar for the hub's client that shows nothing and tells this meter."""
        meter = self

        class Bar(SilentBar):
            def update(self, n: float | None = 1) -> None:
                meter.add(int(n or 0))

        return Bar

    def _tell(self) -> None:
        fraction = min(1.0, self._done / self._total) if self._total else None
        told = LoadProgress(f"fetching {self._what}", fraction, self.line(), self._done, self._total)
        self._progress(told)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
    )


def drop_partial(name: str) -> int:
    """Remove what has come of files of a repository, or of `gguf:owner/name/file`, that are not whole;
    returns its bytes. Any other name has none."""
    repository = "/".join(name.removeprefix("gguf:").split("/")[:2])
    if not _HUB_ID.fullmatch(repository) or ".." in repository:
        return 0
    removed = 0
    for part in _blob(repository, "x").parent.glob(f"*{_PART}"):
        removed += part.stat().st_size
        part.unlink(missing_ok=True)
    return removed


def _blob(repository: str, blob: str) -> Path:
    """Where the cache keeps a file's content."""
    home = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    return home / "blobs" / blob


def _part(repository: str, blob: str) -> Path:
    """Where what has come of it is kept."""
    return _blob(repository, blob).with_name(f"{blob}{_PART}")
