"""The gated short convolution of LFM2, on a state that can be taken back.

Source: `ShortConv` of mlx-lm's lfm2; the state is the last `L_cache - 1` gated inputs.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_dspark.state.recurrent import Arrays, Kept, RecurrentState, extended, last_of, window_of


def short_conv(mixer: Any, x: mx.array, state: RecurrentState) -> mx.array:
    """`[rows, width, hidden]` in and out."""
    b, c, inner = mx.split(mixer.in_proj(x), 3, axis=-1)
    gated = b * inner
    size = mixer.L_cache - 1
    (window,) = state.before(((size, gated.shape[-1]), gated.dtype))
    seen = extended(window, gated)

    def replay(before: Arrays, kept: Kept) -> Arrays:
        del before
        return (window_of(seen, size, kept),)

    state.write((last_of(seen, size),), replay)
    return mixer.out_proj(c * mixer.conv(seen))
