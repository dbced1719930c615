"""Key and value rows of one attention layer that attends within chunks of fixed places."""

from __future__ import annotations

from mlx_dspark.state.kv import KVState


class ChunkedState(KVState):
    """The content of KVState behind the protocol of mlx-lm's ChunkedKVCache.

    All keys stay, so that any suffix can be taken back: the model's own mask hides those before its chunk.
    """

    start_position = 0

    def maybe_trim_front(self) -> None:
        """Nothing is let go."""
