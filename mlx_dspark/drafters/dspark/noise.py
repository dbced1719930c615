"""What tells the anchor from the masks in PrismML's heads: an embedding of how noisy each slot is.

The level is the slot's log signal-to-noise ratio, scaled to 1000 for the anchor and 0 for a mask, and is
given to a small network as sines and cosines (drafter-formats section 7.5).
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_dspark.catalog.formats.base import NOISE_FEATURES

ANCHOR_LEVEL, MASK_LEVEL = 1000.0, 0.0


class NoiseEmbedding(nn.Module):
    """`fc2(silu(fc1(features)))` of a slot's level, computed at the first call and kept."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(NOISE_FEATURES, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self._rows: mx.array | None = None

    def __call__(self, slots: int) -> mx.array:
        """What is added to the embeddings of a block of `slots`: `[slots, hidden]`."""
        if self._rows is None:
            features = mx.array(noise_features(np.array([ANCHOR_LEVEL, MASK_LEVEL])))
            self._rows = self.fc2(nn.silu(self.fc1(features)))
        return self._rows[mx.minimum(mx.arange(slots), 1)]


def noise_features(levels: np.ndarray) -> np.ndarray:
    """`[n]` levels to `[n, 128]` float32: sines, then cosines, of 64 frequencies from 1 down to 1 / 10000."""
    half = NOISE_FEATURES // 2
    angles = levels[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)
