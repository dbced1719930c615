"""Gated delta nets on a state that can be taken back.

Source: `Qwen3NextGatedDeltaNet` of mlx-lm's qwen3_next, `GatedDeltaNet` of its qwen3_5. The state is the last
`conv_kernel_size - 1` inputs of the convolution and the matrix of the delta rule,
`[rows, value heads, value dim, key dim]` in float32.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients
from mlx_lm.models.gated_delta import normalize_qk

from mlx_dspark.state.recurrent import Arrays, Kept, RecurrentState, extended, last_of, window_of
from mlx_dspark.targets.gated_delta.rule import delta_rule


def qwen3_next_delta_net(mixer: Any, x: mx.array, state: RecurrentState) -> mx.array:
    """`[rows, width, hidden]` in and out."""
    rows, width, _ = x.shape
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x), mixer.in_proj_ba(x))
    mixed = mx.concatenate([part.reshape(rows, width, -1) for part in (q, k, v)], axis=-1)
    out = _convolved_rule(mixer, mixed, a, b, state)
    return mixer.out_proj(mixer.norm(out, z).reshape(rows, width, -1))


def qwen3_5_delta_net(mixer: Any, x: mx.array, state: RecurrentState) -> mx.array:
    """`[rows, width, hidden]` in and out."""
    rows, width, _ = x.shape
    if mixer.sharding_group is not None:
        x = cast(Any, sum_gradients(mixer.sharding_group))(x)
    z = mixer.in_proj_z(x).reshape(rows, width, mixer.num_v_heads, mixer.head_v_dim)
    out = _convolved_rule(mixer, mixer.in_proj_qkv(x), mixer.in_proj_a(x), mixer.in_proj_b(x), state)
    out = mixer.out_proj(mixer.norm(out, z).reshape(rows, width, -1))
    if mixer.sharding_group is not None:
        out = mx.distributed.all_sum(out, group=mixer.sharding_group)
    return out


def _convolved_rule(mixer: Any, mixed: mx.array, a: mx.array, b: mx.array, state: RecurrentState) -> mx.array:
    """Convolution and delta rule: queries, keys and values `[rows, width, conv_dim]`, decay and step
    `[rows, width, value heads]` give `[rows, width, value heads, value dim]`."""
    rows, width, _ = mixed.shape
    size = mixer.conv_kernel_size - 1
    window, matrix = state.before(
        ((size, mixer.conv_dim), mixed.dtype),
        ((mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim), mx.float32),
    )
    seen = extended(window, mixed)
    q, k, v = mx.split(nn.silu(mixer.conv1d(seen)), [mixer.key_dim, 2 * mixer.key_dim], axis=-1)
    q = q.reshape(rows, width, mixer.num_k_heads, mixer.head_k_dim)
    k = k.reshape(rows, width, mixer.num_k_heads, mixer.head_k_dim)
    v = v.reshape(rows, width, mixer.num_v_heads, mixer.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=mixer.head_k_dim**-0.5, eps=1e-6)
    out, after, replay_rule = delta_rule(mixer, (q, k, v, a, b), matrix)

    def replay(before: Arrays, kept: Kept) -> Arrays:
        return window_of(seen, size, kept), replay_rule(before[1], kept)

    state.write((last_of(seen, size), after), replay)
    return out
