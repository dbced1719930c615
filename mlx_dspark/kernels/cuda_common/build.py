"""A CUDA kernel for MLX from its text: named after all that it is made of, its registers bounded.

MLX copies the text of a kernel with every launch, and finds the compiled kernel by a hash of it: for tens of
kilobytes that costs the host more than the launch. So the text names the files of the kernel, which the
compiler reads, where they lie as files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx

Factory = Callable[..., Any]
"""As `mx.fast.cuda_kernel`, which is the default."""

HALVES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
"""What a device calls them."""

_FACTS = (("Shape", "shape"), ("Strides", "strides"), ("int", "ndim"))
"""What MLX passes of an input whose name with this ending is in the text of the function, and its type."""


class Block(NamedTuple):
    """Threads of a block, blocks that a multiprocessor is to hold, bytes of a block's shared memory."""

    threads: int
    resident: int
    shared: int


class File(NamedTuple):
    """A file of a kernel's folder."""

    kernel: str
    name: str

    def read(self) -> str:
        """Its text without what only readers need."""
        return source_text(*self)

    def included(self) -> str:
        """The line that has the compiler read it; its text where it is no file that can be named so."""
        place = files("mlx_dspark.kernels") / self.kernel / self.name
        if not isinstance(place, Path) or not place.is_file() or set('"\\\n') & set(str(place.absolute())):
            return self.read()
        return f'#include "{place.absolute()}"\n'


LANES = File("cuda_common", "lanes.cuh")


class Text(NamedTuple):
    """Text of a kernel: what stands before the function, and what in it. The arrays by name, with the type
    of their numbers."""

    header: Sequence[str | File]
    body: File
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def built(stem: str, text: Text, block: Block, factory: Factory | None = None, **options: Any) -> Any:
    """The kernel, to be called as MLX's are; without arguments of a template: constants are in the header.
    What stands in for MLX gets the whole text."""
    header, body = _whole([LANES, *text.header], text.body)
    # MLX keeps what it compiled by name and text, with the shared memory of its first launch.
    name = f"{stem}_{block.resident}_{block.shared}_{crc32((header + body).encode()):08x}"
    declared = _declared(name, text, body, block)
    if factory is None:
        header, body = _short([LANES, *text.header], text.body, text.inputs)
    return (factory or mx.fast.cuda_kernel)(
        name=name,
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        header=header + declared,
        source=body,
        shared_memory=block.shared,
        **options,
    )


def templated(
    stem: str, header: Sequence[str | File], body: File, inputs: Sequence[str], outputs: Sequence[str]
) -> Any:
    """A kernel whose types and numbers are arguments of a template, to be called as MLX's are."""
    whole, (top, text) = "".join(_whole(header, body)), _short(header, body, inputs)
    return mx.fast.cuda_kernel(
        name=f"{stem}_{crc32(whole.encode()):08x}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=top,
        source=text,
    )


def _whole(header: Sequence[str | File], body: File) -> tuple[str, str]:
    return "".join(piece if isinstance(piece, str) else piece.read() for piece in header), body.read()


def _short(header: Sequence[str | File], body: File, inputs: Iterable[str]) -> tuple[str, str]:
    """What the compiler makes the same of. MLX looks in the body for what is to be passed of the inputs."""
    text = body.read()
    facts = [f"{each}_{fact}" for each in inputs for _, fact in _FACTS if f"{each}_{fact}" in text]
    top = "".join(piece if isinstance(piece, str) else piece.included() for piece in header)
    return top, f"// {' '.join(facts)}\n{body.included()}"


def constants(**values: int) -> str:
    return "".join(f"constexpr int {name} = {value};\n" for name, value in values.items())


@cache
def source_text(kernel: str, name: str) -> str:
    """A file of a kernel's folder, without comments and the beginnings of lines."""
    lines = (files("mlx_dspark.kernels") / kernel / name).read_text().splitlines()
    return "".join(f"{line}\n" for line in map(str.strip, lines) if line and not line.startswith("//"))


def _declared(name: str, text: Text, body: str, block: Block) -> str:
    """Declares the function that MLX is about to define, so that its registers suit the launch."""
    parameters = []
    for each, kind in text.inputs.items():
        parameters.append(f"const {kind}* {each}")
        parameters += [
            f"const __grid_constant__ {what} {each}_{fact}"
            for what, fact in _FACTS
            if f"{each}_{fact}" in body
        ]
    parameters += [f"{kind}* {each}" for each, kind in text.outputs.items()]
    bounds = f"__launch_bounds__({block.threads}, {block.resident})"
    inside = ", ".join(parameters)
    return f"namespace mlx::core::cu {{\n__global__ void {bounds} custom_kernel_{name}({inside});\n}}\n"
