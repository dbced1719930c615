"""Checks of this machine and of what is installed on it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from mlx_dspark.doctor.check import FAIL, OK, OPEN, WARN, Check, checked
from mlx_dspark.foundation.installing import NO_BACK_END

_SMALLEST = 2 << 30
"""Bytes of memory below which hardly a model that anybody would use fits."""
_SPARE_DISK = 5 << 30
_SWAPPING = 0.5
_SYSCTL_SECONDS = 5.0


def machine_checks() -> list[Check]:
    """All of them. Calls MLX, in the thread that asks."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("system", system),
        ("versions", versions),
        ("compute", compute),
        ("quantized", quantized),
        ("bandwidth", bandwidth),
        ("memory", memory),
        ("cache", cache),
        ("disk", disk),
        ("models", models),
        ("calibration", calibration),
    ]
    if platform.system() == "Darwin":
        checks.append(("wired limit", wired_limit))
    made = [checked(name, check) for name, check in checks]
    without = [check for check in made if check.found == NO_BACK_END]
    return [check for check in made if check not in without[1:]] + ([] if without else registry())


def system(kind: str = "", machine: str = "") -> Check:
    """Whether MLX has a back end here that is meant for work."""
    kind, machine = kind or platform.system(), machine or platform.machine()
    found = f"{kind} on {machine}, Python {platform.python_version()}"
    if kind == "Darwin" and machine != "arm64":
        fix = "Install a Python for arm64: this one runs translated, or the Mac has no Apple Silicon."
        return Check("system", FAIL, f"{found}, where MLX has no GPU.", fix)
    if kind not in ("Darwin", "Linux"):
        return Check("system", FAIL, f"{found}, which MLX does not support.", "Use macOS or Linux.")
    return Check("system", OK, found)


def versions(needed: Iterable[str] | None = None) -> Check:
    """Whether what this program needs is installed, in versions that it works with."""
    try:
        needed = (requires("mlx-dspark") or []) if needed is None else needed
    except PackageNotFoundError:
        return Check("versions", OPEN, "mlx-dspark is not installed, so what it needs is not known.")
    wrong = [fault for line in needed if (fault := _unmet(Requirement(line)))]
    if wrong:
        pins = " ".join(f"'{requirement}'" for requirement, _ in wrong)
        told = "; ".join(found for _, found in wrong)
        return Check("versions", FAIL, f"{told}.", f"pip install {pins}")
    told = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "transformers"))
    return Check("versions", OK, told)


def _unmet(needed: Requirement) -> tuple[str, str] | None:
    if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
        return None
    plain = f"{needed.name}{needed.specifier}"
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        return plain, f"{needed.name} is not installed"
    if needed.specifier.contains(found, prereleases=True):
        return None
    return plain, f"{needed.name} is {found}, not {needed.specifier}"


def compute() -> Check:
    """A product on MLX's default device against the same in integers."""
    import mlx.core as mx

    device = mx.default_device().type.name
    try:
        found = (mx.arange(6.0).reshape(2, 3) @ mx.arange(6.0).reshape(3, 2)).tolist()
    except RuntimeError as error:
        return Check("compute", FAIL, f"MLX cannot compute on the {device}: {error}.", "Reinstall mlx.")
    if found != [[10.0, 13.0], [28.0, 40.0]]:
        return Check("compute", FAIL, f"MLX on the {device} multiplies wrongly.", "Reinstall mlx.")
    return Check("compute", OK, f"MLX {version('mlx')} on the {device}")


def quantized() -> Check:
    """A product with a matrix in 4 bits against one with the numbers that it stands for."""
    import mlx.core as mx

    try:
        matrix = mx.arange(64 * 128).reshape(64, 128).astype(mx.float32) % 13 - 6
        rows = mx.arange(3 * 128).reshape(3, 128).astype(mx.float32) % 7 - 3
        parts = mx.quantize(matrix, 64, 4)
        found = mx.quantized_matmul(rows, *parts, group_size=64, bits=4)
        off: Any = mx.max(mx.abs(found - rows @ mx.dequantize(*parts).T)).item()
        worst = float(off)
    except RuntimeError as error:
        return Check("quantized", FAIL, f"MLX cannot use quantized weights: {error}.", "Reinstall mlx.")
    if not worst < 0.1:
        return Check("quantized", FAIL, f"Products in 4 bits are off by {worst:.3g}.", "Reinstall mlx.")
    return Check("quantized", OK, "products in 4 bits agree with those of the same numbers")


def bandwidth() -> Check:
    """How fast memory is read, which bounds plain decoding."""
    from mlx_dspark.calibration.bandwidth import bandwidth_here

    rate = bandwidth_here().rate / 1e9
    return Check(
        "bandwidth", OK, f"{rate:.1f} GB/s: a model of 1 GB decodes at most {rate:.1f} tokens a second"
    )


def memory() -> Check:
    """What models can have, and whether the system already swaps."""
    from mlx_dspark.catalog.fit import gigabytes
    from mlx_dspark.catalog.memory import memory_here

    have = memory_here()
    if have is None:
        return Check("memory", OPEN, "How much memory models can have cannot be told.")
    found = f"{gigabytes(have.bytes)} for models ({have.source})"
    if have.bytes < _SMALLEST:
        return Check("memory", WARN, f"{found}.", "Close other programs, or choose a very small model.")
    swap = _swap_share()
    if swap > _SWAPPING:
        return Check("memory", WARN, f"{found}; {swap:.0%} of the swap is in use.", "Close other programs.")
    return Check("memory", OK, found)


def _swap_share() -> float:
    try:
        swap = psutil.swap_memory()
    except (OSError, RuntimeError):
        return 0.0
    return swap.used / swap.total if swap.total else 0.0


def wired_limit(read: Callable[[], str] | None = None) -> Check:
    """Whether the limit of wired GPU memory is macOS' own."""
    try:
        limit = int((read or _wired_limit)())
    except (OSError, ValueError, subprocess.SubprocessError):
        return Check("wired limit", OPEN, "macOS does not tell iogpu.wired_limit_mb.")
    if limit == 0:
        return Check("wired limit", OK, "macOS' own")
    return Check(
        "wired limit",
        WARN,
        f"iogpu.wired_limit_mb is set to {limit}; a system that has too little memory left for itself hangs.",
        "sudo sysctl iogpu.wired_limit_mb=0",
    )


def _wired_limit() -> str:
    command = ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SYSCTL_SECONDS).stdout


def cache() -> Check:
    """Whether what is measured can be kept."""
    from mlx_dspark.foundation.paths import CACHE_DIR_VARIABLE, default_cache_dir

    folder = default_cache_dir()
    probe = folder / "doctor.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        return Check("cache", FAIL, f"{folder} cannot be written: {reason}.", f"Set {CACHE_DIR_VARIABLE}.")
    return Check("cache", OK, str(folder))


def disk() -> Check:
    """Whether a model can still be fetched."""
    from huggingface_hub import constants

    from mlx_dspark.catalog.fit import gigabytes

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", OPEN, f"{folder} does not tell its free space: {error.strerror or error}.")
    found = f"{gigabytes(free)} free where fetched models lie, {constants.HF_HUB_CACHE}"
    if free < _SPARE_DISK:
        fix = "`mlx-dspark models --local` lists what is there, `mlx-dspark rm` removes; or set HF_HOME."
        return Check("disk", WARN, f"{found}.", fix)
    return Check("disk", OK, found)


def models() -> Check:
    """Whether the folders of models can be read."""
    from mlx_dspark.catalog.places import local_models, not_folders
    from mlx_dspark.foundation.paths import MODEL_DIRS_VARIABLE

    count = sum(1 for _ in local_models())
    if absent := not_folders():
        named = ", ".join(map(str, absent))
        return Check(
            "models", WARN, f"{MODEL_DIRS_VARIABLE} names {named}, which is no folder.", "Correct it."
        )
    return Check("models", OK, f"{count} on this machine besides the default model")


def calibration() -> Check:
    """Whether what was measured of pairs can be read."""
    from mlx_dspark.calibration.store import CalibrationStore
    from mlx_dspark.foundation.paths import default_cache_dir

    store = CalibrationStore(default_cache_dir())
    if trouble := store.trouble():
        fix = "Remove it; pairs are then measured again."
        return Check("calibration", WARN, f"{store.file} cannot be read: {trouble}.", fix)
    entries = list(store.entries())
    stale = sum(bool(entry.stale) for entry in entries)
    again = f", {stale} of them to be measured again" if stale else ""
    return Check("calibration", OK, f"{len(entries)} pairs measured{again}")


def registry() -> list[Check]:
    """Whether the rows of known pairs are right, the user's own included."""
    from mlx_dspark.catalog.pairs import load_registry

    known = load_registry()
    faults = [Check("registry", FAIL, fault.sentence, fault.next_step) for fault in known.faults]
    return faults or [Check("registry", OK, f"{len(known.pairs)} pairs")]
