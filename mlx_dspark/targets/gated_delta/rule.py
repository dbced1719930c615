"""The delta rule over a round's positions, and over fewer of them.

On Metal mlx-lm has one kernel for all positions, and a shorter round is replayed by it from its inputs.
Elsewhere mlx-lm steps from position to position; the state after each step is kept then, where it is small
enough, and a shorter round is one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops, gated_delta_update

from mlx_dspark.state.recurrent import Kept

HELD = 1 << 26
"""Most bytes of states that one layer keeps of one round."""

Inputs = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
"""Queries and keys `[rows, width, key heads, key dim]`, values `[rows, width, value heads, value dim]`, decay
and step `[rows, width, value heads]`, before their activations."""

Rule = tuple[mx.array, mx.array, Callable[[mx.array, Kept], mx.array]]
"""Outputs as the values, the state after the last position, and its replay."""


def delta_rule(mixer: Any, inputs: Inputs, matrix: mx.array) -> Rule:
    width = inputs[0].shape[1]
    if width > 1 and width * matrix.nbytes <= HELD and not _one_kernel(mixer):
        return _stepped(mixer, inputs, matrix)
    return _taped(mixer, inputs, matrix)


def _one_kernel(mixer: Any) -> bool:
    on_metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    return on_metal and mixer.head_k_dim % 32 == 0 and not mixer.training


def _taped(mixer: Any, inputs: Inputs, matrix: mx.array) -> Rule:
    def update(before: mx.array, inputs: Inputs, mask: mx.array | None) -> tuple[mx.array, mx.array]:
        of_model = (mixer.A_log, mixer.dt_bias, before, mask)
        return gated_delta_update(*inputs, *of_model, use_kernel=not mixer.training)

    def replay(before: mx.array, kept: Kept) -> mx.array:
        q, k, v, a, b = (part[:, : kept.longest] for part in inputs)
        return update(before, (q, k, v, a, b), kept.mask)[1]

    return *update(matrix, inputs, None), replay


def _stepped(mixer: Any, inputs: Inputs, matrix: mx.array) -> Rule:
    q, k, v, a, b = inputs
    repeats = v.shape[2] // k.shape[2]
    q, k = (mx.repeat(part, repeats, axis=2) if repeats > 1 else part for part in (q, k))
    parts = (q, k, v, compute_g(mixer.A_log, a, mixer.dt_bias), mx.sigmoid(b))
    outs, states, after = [], [], matrix
    for t in range(q.shape[1]):
        q, k, v, decay, step = (part[:, t : t + 1] for part in parts)
        out, after = gated_delta_ops(q, k, v, decay, step, after)
        outs.append(out)
        states.append(after)

    def replay(before: mx.array, kept: Kept) -> mx.array:
        after = [before, *states]
        if kept.level:
            return after[kept.longest]
        return mx.concatenate([after[length][r : r + 1] for r, length in enumerate(kept.lengths)])

    return mx.concatenate(outs, axis=1), after, replay
