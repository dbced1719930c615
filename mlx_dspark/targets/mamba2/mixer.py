"""Mamba-2 on a state that can be taken back.

Source: `NemotronHMamba2Mixer` of mlx-lm's nemotron_h. The state is the last `conv_kernel_size - 1` inputs of
the convolution and `[rows, heads, head dim, state size]`. The tape holds what the recurrence reads.

mlx-lm computes several positions in a matrix form and, on Metal, one position in a kernel of its own: states
reached by other widths differ in their last bits.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.ssm import ssm_update

from mlx_dspark.state.recurrent import Arrays, Kept, RecurrentState, extended, last_of, window_of


def mamba2(mixer: Any, x: mx.array, state: RecurrentState) -> mx.array:
    """`[rows, width, hidden]` in and out."""
    inner, size = mixer.intermediate_size, mixer.conv_kernel_size - 1
    gate, inputs, dt = mx.split(mixer.in_proj(x), [inner, inner + mixer.conv_dim], axis=-1)
    window, matrix = state.before(
        ((size, mixer.conv_dim), inputs.dtype),
        ((mixer.num_heads, mixer.head_dim, mixer.ssm_state_size), mx.float32),
    )
    seen = extended(window, inputs)
    convolved = nn.silu(mixer.conv1d(seen))
    tape = (*_split(mixer, convolved), dt)

    def update(before: mx.array, inputs: tuple[mx.array, ...], kept: Kept | None) -> Any:
        x, b, c, dt = inputs
        ragged = {} if kept is None or kept.level else {"mask": kept.mask, "lengths": kept.array}
        of_model = (mixer.D.astype(x.dtype), dt, mixer.dt_bias, before, mixer.time_step_limit)
        return ssm_update(x, mixer.A_log, b, c, *of_model, **ragged)

    def replay(before: Arrays, kept: Kept) -> Arrays:
        cut = tuple(part[:, : kept.longest] for part in tape)
        return window_of(seen, size, kept), update(before[1], cut, kept)[1]

    out, after = update(matrix, tape, None)
    state.write((last_of(seen, size), after), replay)
    return mixer.out_proj(mixer.norm(out.flatten(2), gate))


def _split(mixer: Any, convolved: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Input `[rows, width, heads, head dim]`, and what writes to and reads from the state,
    `[rows, width, groups, state size]`."""
    rows, width, _ = convolved.shape
    inner, of_groups = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    x, b, c = mx.split(convolved, [inner, inner + of_groups], axis=-1)
    return (
        x.reshape(rows, width, mixer.num_heads, mixer.head_dim),
        b.reshape(rows, width, mixer.n_groups, mixer.ssm_state_size),
        c.reshape(rows, width, mixer.n_groups, mixer.ssm_state_size),
    )
