"""From a kernel's source to a library for the CPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import mlx.core as mx

HERE = Path(__file__).parent
NAMES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}


def compiler() -> list[str]:
    """The machine's C++ compiler, else that of the package `ziglang`."""
    return ["c++"] if which("c++") is not None else [sys.executable, "-m", "ziglang", "c++"]


_OPTIONS = ("-std=c++20", "-O1", "-w", "-fPIC")


@cache
def _header(name: str) -> TemporaryDirectory[str]:
    """A folder with the header in the form in which GCC reads it faster; other compilers pass it over."""
    folder = TemporaryDirectory()
    options = ["-x", "c++-header", "-o", f"{folder.name}/{name}.gch", str(HERE / name)]
    subprocess.run([*compiler(), *_OPTIONS, *options], check=True)
    return folder


def compiled_text(text: str, folder: Path) -> ctypes.CDLL:
    """The library of one source text, which begins with a header of the shim's."""
    main, library = folder / "main.cpp", folder / "kernel.so"
    main.write_text(text)
    places = [f"-I{_header(text.split(chr(34))[1]).name}", f"-I{HERE}"]
    options = ["-shared", *places, "-o", str(library), str(main)]
    subprocess.run([*compiler(), *_OPTIONS, *options], check=True)
    return ctypes.CDLL(str(library))


def changed(source: Mapping[str, str], change: tuple[str, str] | None) -> dict[str, str]:
    """`source` by file name, with a piece replaced that must be there once."""
    if change is None:
        return dict(source)
    holders = [name for name, text in source.items() if change[0] in text]
    assert len(holders) == 1, f"{change[0]!r} is in {holders}"
    assert source[holders[0]].count(change[0]) == 1
    return {**source, holders[0]: source[holders[0]].replace(*change)}
