"""What a kernel is made of, as a few digits: what was found out of another text does not count."""

from __future__ import annotations

import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from zlib import crc32

_HOME = "mlx_dspark.kernels."
_SHARED = {"cuda": ("cuda_common",)}
"""Folders besides its own that a kernel of a back end takes text from."""


def edition(kernel: object, back_end: str = "") -> str:
    """Of the files in the folder of a kernel of ours, and in those it shares; of the module of any other."""
    return _edition(type(kernel).__module__, back_end)


@cache
def _edition(module: str, back_end: str) -> str:
    if not module.startswith(_HOME):
        file = getattr(sys.modules.get(module), "__file__", None)
        return _digits([Path(file).read_bytes()] if file else [])
    folders = (module.removeprefix(_HOME).partition(".")[0], *_SHARED.get(back_end, ()))
    home = files("mlx_dspark.kernels")
    texts = [
        each.name.encode() + each.read_bytes()
        for folder in folders
        for each in sorted((home / folder).iterdir(), key=lambda each: each.name)
        if each.is_file() and not each.name.endswith((".md", ".pyc"))
    ]
    return _digits(texts)


def _digits(texts: list[bytes]) -> str:
    return f"{crc32(b''.join(texts)):08x}"
