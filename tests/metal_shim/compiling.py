"""From a captured launch to a library or a program for the CPU. A process has one folder for them."""

from __future__ import annotations

import atexit
import platform
import subprocess
import sys
from collections.abc import Sequence
from enum import Enum
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import rmtree, which
from tempfile import mkdtemp

from tests.metal_shim.capture import Launch
from tests.metal_shim.errors import NotMetal, ShimError
from tests.metal_shim.rewrite import rewritten
from tests.metal_shim.signature import arguments, function, signature

HERE = Path(__file__).parent / "cpp"
RUNTIME = ("fiber.cpp", "group.cpp", "launch.cpp")


class Mode(Enum):
    """How a launch is run: in this process, under a sanitizer, or counting its traffic."""

    PLAIN = "plain"
    ADDRESS = "address"
    THREAD = "thread"
    TRAFFIC = "traffic"

    @property
    def sanitizes(self) -> bool:
        return self in (Mode.ADDRESS, Mode.THREAD)


_KERNEL_FLAGS = {
    Mode.PLAIN: ["-O1"],
    Mode.ADDRESS: [
        "-O1",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize=alignment,vptr",
        "-fno-omit-frame-pointer",
    ],
    Mode.THREAD: ["-O1", "-g1", "-fsanitize=thread"],
    Mode.TRAFFIC: ["-O2", "-fsanitize=thread"],
}
_RUNTIME_FLAGS = {Mode.ADDRESS: ["-DSHIM_ASAN"], Mode.THREAD: ["-DSHIM_TSAN"]}


def compiled(launch: Launch, mode: Mode, *, portable: bool = False) -> Path:
    """The library of a launch, or its program for a sanitizer. `portable` switches fibers by ucontext, as on
    processors other than x86-64. Raises `NotMetal` where the source cannot be read or does not compile."""
    if mode.sanitizes and compiler()[0] == sys.executable:
        raise ShimError("the sanitizers need the machine's own C++ compiler: install g++ or clang")
    text = translated(launch)
    key = sha256(f"{text}{mode}{portable}".encode()).hexdigest()[:24]
    made = folder() / f"{key}.{'exe' if mode.sanitizes else 'so'}"
    if made.exists():
        return made
    source, part = folder() / f"{key}.cpp", folder() / f"{key}.o"
    source.write_text(text)
    headers = [f"-I{_precompiled()}"] if mode is Mode.PLAIN else []
    _compile([*_KERNEL_FLAGS[mode], "-c", str(source)], part, headers)
    link = (
        [f"-fsanitize={'address,undefined' if mode is Mode.ADDRESS else 'thread'}"]
        if mode.sanitizes
        else ["-shared"]
    )
    _compile([*link, str(part), *map(str, _runtime(mode, portable))], made)
    return made


def translated(launch: Launch) -> str:
    """The C++ translation unit of a launch; errors name lines of the Metal source."""
    found = signature(launch.source, launch.name)
    return (
        '#include "metal.hpp"\n#line 1 "kernel.metal"\n'
        + rewritten(function(launch.name, found)).text
        + '\n#line 1 "entry"\n'
        + _ENTRY.replace("$call", f"{launch.name}{launch.arguments}({arguments(found)})")
    )


_ENTRY = """
static void shim_body(void* given, const shim::Self& self) {
  void** buffers = static_cast<void**>(given);
  (void)buffers, (void)self;
  $call;
}
extern "C" int shim_entry(void** buffers, const uint32_t* grid, const uint32_t* size, 
                          const shim::Options* options, shim::Counts* counts, char* error, size_t room) {
  return shim::launch({grid[0], grid[1], grid[2]}, {size[0], size[1], size[2]}, *options, shim_body, buffers,
                      counts, error, room);
}
"""


@cache
def folder() -> Path:
    """Where this process compiles to; removed at its end."""
    made = Path(mkdtemp(prefix="metal-shim-"))
    atexit.register(rmtree, made, ignore_errors=True)
    return made


@cache
def compiler() -> list[str]:
    """The machine's C++ compiler, else that of the package `ziglang`, which has no sanitizer runtimes."""
    found = which("c++")
    return [found] if found else [sys.executable, "-m", "ziglang", "c++"]


@cache
def flags() -> list[str]:
    """Metal has no double, contracts nothing by default here, and leaves no variable zero by luck."""
    made = ["-std=c++17", "-fPIC", "-pthread", "-w", f"-I{HERE}", "-ffp-contract=off", "-fno-strict-aliasing"]
    made += ["-fsigned-char", "-ftrivial-auto-var-init=pattern"]
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    is_clang = "clang" in version
    if is_clang:
        made += ["-Xclang", "-cl-single-precision-constant"]
    else:  # a loop that becomes a call of memcpy is not counted
        made += ["-fsingle-precision-constant", "-fno-tree-loop-distribute-patterns"]
    if platform.machine() == "x86_64" and _has_half_conversions():
        made += ["-mf16c", "-mavx2"]
    return made


def _has_half_conversions() -> bool:
    cpu = Path("/proc/cpuinfo")
    words = cpu.read_text().split() if cpu.exists() else []
    return "f16c" in words and "avx2" in words


@cache
def _runtime(mode: Mode, portable: bool) -> list[Path]:
    """The runtime's objects, never instrumented: what it does is no thread's access."""
    names = [
        *RUNTIME,
        *(["runner.cpp"] if mode.sanitizes else []),
        *(["traffic.cpp"] if mode is Mode.TRAFFIC else []),
    ]
    options = ["-O2", *_RUNTIME_FLAGS.get(mode, []), *(["-DSHIM_UCONTEXT"] if portable else [])]
    made = []
    for name in names:
        part = folder() / f"{name}-{sha256(repr(options).encode()).hexdigest()[:8]}.o"
        if not part.exists():
            _compile([*options, "-c", str(HERE / name)], part)
        made.append(part)
    return made


@cache
def _precompiled() -> Path:
    """A folder with the header as g++ takes it in place of its text; other compilers pass it by."""
    home = folder() / "precompiled"
    home.mkdir()
    _compile(
        [*_KERNEL_FLAGS[Mode.PLAIN], "-x", "c++-header", str(HERE / "metal.hpp")], home / "metal.hpp.gch"
    )
    return home


def _compile(options: list[str], made: Path, headers: Sequence[str] = ()) -> None:
    """`headers` are options that come first."""
    if not made.parent.exists():
        raise ShimError(f"the folder for compiled kernels is gone: {made.parent}")
    command = [*compiler(), *headers, *flags(), *options, "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotMetal(f"does not compile:\n{done.stderr[:6000]}")
