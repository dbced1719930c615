"""How this program is installed again with what it lacks: it comes from a folder, not from a registry."""

from __future__ import annotations

import json
import platform
import shlex
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlx_dspark.foundation.errors import LoadError

NO_BACK_END = "MLX has no back end here."
_BACK_ENDS = ("mlx-cpu", "mlx-cuda-13", "mlx-cuda-12", "mlx-metal")
_SOMEWHERE = "/path/to/this/folder"


def pip_install(*extras: str) -> str:
    """The command that adds these extras, and a back end of MLX where Linux has none."""
    wanted = [*extras]
    if platform.system() == "Linux" and "cpu" not in wanted and not any(map(_installed, _BACK_ENDS)):
        wanted.insert(0, "cpu")
    return f"pip install {shlex.quote(f'{_folder()}[' + ','.join(wanted) + ']')}"


def no_back_end(error: ImportError) -> LoadError | None:
    """What to say of an import that failed because MLX lacks the library which computes; None for another."""
    if isinstance(error, ModuleNotFoundError) or not (
        (error.name or "").startswith("mlx.") or "libmlx" in str(error)
    ):
        return None
    return LoadError(
        NO_BACK_END,
        f"Install one: {pip_install('cpu', 'serve')}; cuda13 in place of cpu is for an NVIDIA GPU."
        if platform.system() == "Linux"
        else f"Reinstall it: {pip_install('serve')}.",
    )


def _installed(name: str) -> bool:
    try:
        return bool(Distribution.from_name(name))
    except PackageNotFoundError:
        return False


def _folder() -> str:
    """The folder that this program was installed from, where that can be told."""
    source = Path(__file__).parents[2]
    if (source / "pyproject.toml").is_file():
        return str(source)
    try:
        told = json.loads(Distribution.from_name("mlx-dspark").read_text("direct_url.json") or "{}")
        address = urlsplit(told["url"])
    except (PackageNotFoundError, ValueError, KeyError, TypeError):
        return _SOMEWHERE
    return unquote(address.path) if address.scheme == "file" else _SOMEWHERE
