"""From a kernel's source to a library for the CPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import which

import mlx.core as mx

HERE = Path(__file__).parent
NAMES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}


def compiler() -> list[str]:
    """The machine's C++ compiler, else that of the package `ziglang`."""
    return ["c++"] if which("c++") is not None else [sys.executable, "-m", "ziglang", "c++"]


def compiled_text(text: str, folder: Path) -> ctypes.CDLL:
    """The library of one source text."""
    main, library = folder / "main.cpp", folder / "kernel.so"
    main.write_text(text)
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}"]
    subprocess.run([*compiler(), *options, "-o", str(library), str(main)], check=True)
    return ctypes.CDLL(str(library))


def changed(source: Mapping[str, str], change: tuple[str, str] | None) -> dict[str, str]:
    """`source` by file name, with a piece replaced that must be there once."""
    if change is None:
        return dict(source)
    holders = [name for name, text in source.items() if change[0] in text]
    assert len(holders) == 1, f"{change[0]!r} is in {holders}"
    assert source[holders[0]].count(change[0]) == 1
    return {**source, holders[0]: source[holders[0]].replace(*change)}
