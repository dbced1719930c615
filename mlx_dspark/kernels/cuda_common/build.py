"""A CUDA kernel for MLX from its text: named after all that it is made of, its registers bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx

from mlx_dspark.kernels.cuda_common.named import NamedKernel

Factory = Callable[..., Any]
"""As `mx.fast.cuda_kernel`, which is the default."""

HALVES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
"""What a device calls them."""


class Block(NamedTuple):
    """Threads of a block, blocks that a multiprocessor is to hold, bytes of a block's shared memory."""

    threads: int
    resident: int
    shared: int


class Text(NamedTuple):
    """Text of a kernel: what stands before the function, and what in it. The arrays by name, with the type
    of their numbers."""

    header: str
    body: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def built(
    stem: str,
    text: Text,
    block: Block,
    factory: Factory | None = None,
    *,
    lazy: int | None = None,
    **options: Any,
) -> NamedKernel:
    """The kernel, to be called as MLX's are; without arguments of a template: constants are in the header.
    `lazy`: see NamedKernel."""
    header = source_text("cuda_common", "lanes.cuh") + text.header
    # MLX keeps what it compiled by name, on disk too, with its shared memory: the name tells them apart.
    name = f"{stem}_{block.resident}_{block.shared}_{crc32((header + text.body).encode()):08x}"
    return NamedKernel(
        factory=factory,
        lazy=lazy,
        name=name,
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        header=header + _declared(name, text, block),
        source=text.body,
        shared_memory=block.shared,
        **options,
    )


def constants(**values: int) -> str:
    return "".join(f"constexpr int {name} = {value};\n" for name, value in values.items())


@cache
def source_text(kernel: str, name: str) -> str:
    """A file of a kernel's folder, without what only readers need: each call copies a kernel's text."""
    lines = (files("mlx_dspark.kernels") / kernel / name).read_text().splitlines()
    return "".join(f"{line}\n" for line in map(str.strip, lines) if line and not line.startswith("//"))


def _declared(name: str, text: Text, block: Block) -> str:
    """Declares the function that MLX is about to define, so that its registers suit the launch."""
    parameters = []
    for each, kind in text.inputs.items():
        parameters.append(f"const {kind}* {each}")
        for what, its in (("Shape", "shape"), ("Strides", "strides"), ("int", "ndim")):
            if f"{each}_{its}" in text.body:
                parameters.append(f"const __grid_constant__ {what} {each}_{its}")
    parameters += [f"{kind}* {each}" for each, kind in text.outputs.items()]
    bounds = f"__launch_bounds__({block.threads}, {block.resident})"
    inside = ", ".join(parameters)
    return f"namespace mlx::core::cu {{\n__global__ void {bounds} custom_kernel_{name}({inside});\n}}\n"
