"""The greedy Markov chain outside MLX, for heads whose matrices the CPU back end holds itself.

A slot of the chain is one row through a small matrix. In MLX each would wait for the token before it and pay
the fixed cost of several operations; the sums and their order are the same here.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.drafters.dspark.heads import MarkovHead
from mlx_dspark.kernels.base import Floats, HeldMatrix
from mlx_dspark.kernels.modules import HeldEmbedding, HeldLinear, as_rows


@dataclass(frozen=True)
class HostChain:
    """A drafted block: target ids `[rows, width]`, logits with the bias `[rows, width, draft_vocab]`, and the
    embedded tokens before `[rows, width, rank]`."""

    tokens: mx.array
    logits: mx.array
    previous: mx.array


class HostMarkov:
    """A vanilla Markov head over held matrices. `ids` `[draft_vocab]` are target ids; None: all of them."""

    def __init__(self, table: HeldMatrix, project: HeldMatrix, ids: NDArray[np.int64] | None) -> None:
        self._table = table
        self._project = project
        self._ids = ids

    @classmethod
    def of(cls, head: nn.Module | None, ids: mx.array | None) -> HostMarkov | None:
        """The same head; None for another kind of head, or one whose matrices MLX holds."""
        if type(head) is not MarkovHead:
            return None
        table, project = head.markov_w1, head.markov_w2
        if not isinstance(table, HeldEmbedding) or not isinstance(project, HeldLinear):
            return None
        return cls(table.matrix, project.matrix, None if ids is None else np.array(ids).astype(np.int64))

    def greedy(self, base: mx.array, anchors: mx.array) -> HostChain:
        """The likeliest draft of every slot, given the one before; `base` `[rows, width, draft_vocab]`."""
        logits = as_rows(base).reshape(base.shape).copy()
        rows, width, _ = logits.shape
        tokens = np.empty((rows, width), np.int64)
        embedded: list[Floats] = []
        token = np.array(anchors).astype(np.int64)
        for slot in range(width):
            embedded.append(self._table.lookup(token))
            logits[:, slot] += self._project.multiply(embedded[-1])
            token = np.argmax(logits[:, slot], axis=-1)
            token = token if self._ids is None else self._ids[token]
            tokens[:, slot] = token
        previous = mx.array(np.stack(embedded, axis=1))
        return HostChain(mx.array(tokens.astype(np.int32)), mx.array(logits), previous)
