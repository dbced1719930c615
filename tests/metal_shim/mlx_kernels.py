"""Kernels of MLX itself, from the headers in its wheel: how the shim is told from what it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(mx.__file__).parent / "include"
_HOME = "mlx/backend/metal/kernels/"
_INCLUDE = re.compile(r'#include [<"]([^">]*)[">]\n')
_QUANTIZED = [_HOME + name for name in ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")]


def attention(
    metal_kernel: Callable[..., Any], q: mx.array, k: mx.array, v: mx.array, causal: bool
) -> mx.array:
    """`sdpa_vector`: q [heads, width, dim], k and v [kv heads, length, dim], with a scale of dim ** -0.5."""
    heads, width, dim = q.shape
    kv_heads, length = k.shape[:2]
    made = metal_kernel(
        name="mlx_attention",
        input_names=["q", "k", "v"],
        output_names=["out"],
        header=_attention_header(causal),
        source=f"""
            const int group = {heads // kv_heads}, keys = k_shape[1], none = 0;
            const size_t head = {length * dim}, row = {dim};
            const float scale = {dim**-0.5}f;
            sdpa_vector<T, {dim}>(q, k, v, out, group, keys, head, row, head, row, scale, nullptr, nullptr,
                none, none, none, nullptr, none, threadgroup_position_in_grid, threadgroups_per_grid,
                simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
        """,
    )
    return made(
        inputs=[q, k, v],
        template=[("T", q.dtype)],
        grid=(heads * 1024, width, 1),
        threadgroup=(1024, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )[0]


def quantized_product(
    metal_kernel: Callable[..., Any], x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, bits: int
) -> mx.array:
    """`affine_qmm_t`: x [rows, inputs] times the transposed matrix [outputs, inputs]."""
    rows, inputs = x.shape
    outputs = w.shape[0]
    group = inputs // scales.shape[1]
    made = metal_kernel(
        name="mlx_product",
        input_names=["x", "w", "scales", "biases"],
        output_names=["y"],
        header=_quantized_header(),
        source=f"""
            const int K = {inputs}, N = {outputs}, M = {rows}, none = 0;
            affine_qmm_t<T, {group}, {bits}, {str(outputs % 32 == 0).lower()}, false>(w, scales, biases, x, y,
                K, N, M, none, nullptr, nullptr, none, nullptr, nullptr, nullptr, nullptr,
                threadgroup_position_in_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
                thread_index_in_simdgroup);
        """,
    )
    return made(
        inputs=[x, w, scales, biases],
        template=[("T", x.dtype)],
        grid=(-(-outputs // 32) * 32, -(-rows // 32) * 2, 2),
        threadgroup=(32, 2, 2),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )[0]


@cache
def _attention_header(causal: bool) -> str:
    text = _inlined([_HOME + "sdpa_vector.h"])
    set_to = {"do_causal": str(causal).lower(), "blocks": "1"}

    def fixed(found: re.Match[str]) -> str:
        return f"constant {found[1]} {found[2]} = {set_to.get(found[2], 'false')};"

    text = re.sub(r"constant (\w+) (\w+)\s*\[\[function_constant\(\d+\)\]\];", fixed, text)
    return _plain(text)


@cache
def _quantized_header() -> str:
    return _one_pointer_trait(_plain(_utilities() + _inlined(_QUANTIZED)))


def _utilities() -> str:
    """The sections of MLX's utilities that the quantized kernels use; others need types the shim has not."""
    sections = re.split(r"/{40,}\n", (ROOT / _HOME / "utils.h").read_text())
    wanted = ("METAL_FUNC IdxT elem_to_loc(", "struct ConditionalType {", "bool schedule_row_tile(")
    return "struct complex64_t { float real, imag; complex64_t(float r, float i = 0); };\n" + "\n".join(
        section for section in sections if any(word in section for word in wanted)
    )


def _one_pointer_trait(text: str) -> str:
    """The trait of pointers in each address space once, as address spaces are empty words here."""
    trait = r"template <typename T>\nstruct pointer_element<(?:device|constant|threadgroup) T\*> \{.*?\};\n"
    return re.sub(trait, "", text, flags=re.DOTALL)


def _plain(text: str) -> str:
    """Functions in place of kernels: without attributes."""
    return re.sub(r"\[\[.*?\]\]", "", text, flags=re.DOTALL)


def _inlined(names: list[str]) -> str:
    """The headers with what they include of MLX's own, each once."""
    seen: set[str] = set()

    def read(name: str) -> str:
        if not name.startswith("mlx/") or name in seen:
            return ""
        seen.add(name)
        text = (ROOT / name).read_text().replace("#pragma once", "")
        return _INCLUDE.sub(lambda found: read(found[1]), text)

    return "\n".join(read(name) for name in names)
