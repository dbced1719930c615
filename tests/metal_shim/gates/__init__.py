"""What needs no run: address spaces, and the registers and memory that a kernel takes.

clang compiles the source with Metal's address spaces as its own, where a pointer without or with the wrong
one is an error as it is on a Mac, and for a GPU that it knows, which tells registers. These are a proxy, as
the allocator is not Apple's; but arrays that it could not keep in registers, and variants that need more of
them, show. clang is that of the package `ziglang`.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from tests.metal_shim.capture import Launch
from tests.metal_shim.compiling import folder
from tests.metal_shim.errors import NotMetal
from tests.metal_shim.rewrite import rewritten_for_gates
from tests.metal_shim.signature import Signature, signature

HERE = Path(__file__).parent
GPU = "gfx1100"
"""A GPU with SIMD-groups of 32 lanes."""

REGISTERS = 53_248
"""Registers of a threadgroup that the oldest supported chips have, as other projects found: 208 KB a core."""

_VECTOR = re.compile(r"\b((?:float|half|bfloat|u?int|u?short|u?char|u?long)[234])\(")
_LANES = {
    "thread_index_in_simdgroup": "(gate_thread() & 31)",
    "simdgroup_index_in_threadgroup": "gate_uniform(gate_thread() >> 5)",
    "thread_index_in_threadgroup": "gate_thread()",
    "threads_per_simdgroup": "32",
    "simdgroups_per_threadgroup": "gate_uniform(8)",
}


@dataclass(frozen=True)
class Resources:
    """Of one launch. `scratch_bytes` are private memory of a thread: arrays that found no registers."""

    threads: int
    threadgroup_bytes: int
    scratch_bytes: int
    registers: int

    def excess(self) -> list[str]:
        """Which of the gates the launch does not pass."""
        found = []
        if self.threads > 256:
            found.append(f"{self.threads} threads in a threadgroup, at most 256")
        if self.threadgroup_bytes > 32 * 1024:
            found.append(f"{self.threadgroup_bytes} bytes of threadgroup memory, at most 32768")
        if self.scratch_bytes:
            found.append(f"{self.scratch_bytes} bytes of private memory that are not in registers")
        if self.registers * self.threads > REGISTERS:
            found.append(f"{self.registers} registers x {self.threads} threads, at most {REGISTERS}")
        return found


def resources(launch: Launch) -> Resources:
    """What the launch takes. Raises `NotMetal` with what clang says of address spaces and types."""
    text = translated(launch)
    key = sha256(text.encode()).hexdigest()[:24]
    source, made = folder() / f"{key}.gate.cpp", folder() / f"{key}.s"
    source.write_text(text)
    _clang(launch, ["-target", "x86_64-linux-gnu", "-fsyntax-only", str(source)])
    gpu = ["-target", "amdgcn-amd-amdhsa", f"-mcpu={GPU}", "-nogpulib"]
    _clang(launch, [*gpu, "-O3", "-S", str(source), "-o", str(made)])
    told = made.read_text()
    return Resources(
        threads=launch.threads,
        threadgroup_bytes=_number(told, "group_segment_fixed_size"),
        scratch_bytes=_number(told, "private_segment_fixed_size"),
        registers=_number(told, "vgpr_count"),
    )


@cache
def _zig() -> str:
    """The program of the package `ziglang`, which is clang too."""
    found = find_spec("ziglang")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the gates need clang: pip install ziglang")
    return str(Path(found.origin).parent / "zig")


def _clang(launch: Launch, options: list[str]) -> None:
    command = [_zig(), "clang", "-std=c++17", "-fno-exceptions", "-w", f"-I{HERE}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotMetal(f"{launch.name}:\n{done.stderr[:4000]}")


def translated(launch: Launch) -> str:
    """The kernel as clang takes it for a GPU: template arguments fixed, references to buffers as pointers."""
    found = signature(launch.source, launch.name)
    parameters, lines = list[str](), list[str]()
    for each in found.parameters:
        if each.attribute is not None:
            lines.append(f"{each.type} {each.name} = {_attribute(each.attribute, each.type)};")
        elif each.type.endswith("&"):
            parameters.append(f"{each.type[:-1]}* shim_{each.name}")
            lines.append(f"{each.type} {each.name} = *shim_{each.name};")
        else:
            parameters.append(f"{each.type} {each.name}")
    kind = f"amdgpu_kernel, amdgpu_flat_work_group_size(1, {launch.threads})"
    head = f'extern "C" __attribute__(({kind})) void shim_kernel({", ".join(parameters)}) {{\n'
    line = launch.source.count("\n", 0, launch.source.index(found.body[:200])) + 1
    before, body = _fixed(found, launch.arguments), rewritten_for_gates(found.body)
    text = f'{rewritten_for_gates(before)}\n{head}{" ".join(lines)}\n#line {line} "kernel.metal"\n{body}'
    return f'#include "gpu.hpp"\n{_VECTOR.sub(_made, text)}'


def _fixed(found: Signature, arguments: str) -> str:
    """What precedes the kernel, with its template's parameters as names of what they are here."""
    if not arguments:
        return found.before
    at = found.before.rindex("template <")
    names = found.before[at:].strip().removeprefix("template <").removesuffix(">").split(", ")
    lines = []
    for name, value in zip(names, arguments[1:-1].split(", "), strict=True):
        kind, word = name.split()
        lines.append(
            f"typedef {value} {word};" if kind == "typename" else f"constexpr {kind} {word} = {value};"
        )
    return found.before[:at] + "\n".join(lines) + "\n"


def _attribute(name: str, kind: str) -> str:
    if name in _LANES:
        return _LANES[name]
    if kind != "uint3":
        raise NotMetal(f"the gates know no attribute {name!r}")
    return "{gate_group(0), gate_group(1), gate_group(2)}"


def _made(found: re.Match[str]) -> str:
    return f"gate_vector<{found.group(1)}>("


def _number(text: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s*(\d+)", text)
    if found is None:
        raise NotMetal(f"clang told no {key}")
    return int(found.group(1))
