"""Laws of the CUDA kernel for greedy Markov chains, run on a CPU: it drafts what the head drafts."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_chain.chain import GreedyChain
from tests.cuda_shim.chain import greedy

VOCAB, DRAFTS, ROWS, WIDTH = 300, 200, 2, 3


def head(rank: int, bits: int, dtype: mx.Dtype, drafts: int) -> tuple[nn.Module, nn.Module]:
    """A table and a projection; `bits` 16 leaves them as they are."""
    keys = mx.random.split(mx.random.key(rank + bits), 2)
    table, project = nn.Embedding(VOCAB, rank), nn.Linear(rank, drafts, bias=False)
    table.weight = mx.random.normal(table.weight.shape, key=keys[0]).astype(dtype)
    project.weight = mx.random.normal(project.weight.shape, key=keys[1]).astype(dtype)
    if bits == 16:
        return table, project
    return table.to_quantized(64, bits), project.to_quantized(64, bits)


def ids_of(drafts: int) -> mx.array:
    return mx.array(np.sort(np.random.default_rng(3).permutation(VOCAB)[:drafts]).astype(np.int32))


def numbers(module: nn.Module) -> np.ndarray:
    """The matrix in float32."""
    weight = module["weight"]
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        scales, biases = (module[each].astype(mx.float32) for each in ("scales", "biases"))
        weight = mx.dequantize(weight, scales, biases, module.group_size, module.bits)
    return np.array(weight.astype(mx.float32))


def reference(
    modules: tuple[nn.Module, nn.Module], base: mx.array, anchors: list[int], ids: mx.array | None
) -> np.ndarray:
    """The chain in float32: each draft is the best given the one before."""
    table, project = map(numbers, modules)
    plain = np.array(base.astype(mx.float32))
    known = np.arange(plain.shape[2]) if ids is None else np.array(ids)
    drafts = np.empty(plain.shape[:2], np.int32)
    for row, token in enumerate(anchors):
        for slot in range(plain.shape[1]):
            token = int(known[np.argmax(plain[row, slot] + project @ table[token])])
            drafts[row, slot] = token
    return drafts


def drafted(
    rank: int, bits: int, dtype: mx.Dtype, reduced: bool, folder: Path, change: tuple[str, str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    drafts = DRAFTS if reduced else VOCAB
    modules = head(rank, bits, dtype, drafts)
    ids = ids_of(drafts) if reduced else None
    base = (3 * mx.random.normal((ROWS, WIDTH, drafts), key=mx.random.key(5))).astype(dtype)
    anchors = [7, VOCAB - 1]
    sources = [Source.of(each) for each in modules]
    chain = GreedyChain.of(sources[0], sources[1], ids)
    assert chain is not None
    got = greedy(chain, base, mx.array(anchors), folder, change)
    return got, reference(modules, base, anchors, ids)


@pytest.mark.parametrize(
    ("rank", "bits", "dtype", "reduced"),
    [
        (64, 4, mx.bfloat16, True),
        (64, 8, mx.float16, False),
        (64, 16, mx.bfloat16, False),
        (256, 4, mx.float16, False),
        (256, 16, mx.float16, True),
    ],
)
def test_the_kernel_drafts_the_best_of_every_slot(
    rank: int, bits: int, dtype: mx.Dtype, reduced: bool, tmp_path: Path
) -> None:
    got, wanted = drafted(rank, bits, dtype, reduced, tmp_path)
    np.testing.assert_array_equal(got, wanted)


CHANGES = {
    "leaves out the biases": (" + float(biases[group]) * total", ""),
    "adds up half of the lanes": ("for (int step = LANES / 2; step;", "for (int step = LANES / 4; step;"),
    "takes ids for indices": ("chosen = ids[index];", "chosen = index;"),
    "takes the slot before": ("(long long)row * width + slot)", "(long long)row * width + max(slot - 1, 0))"),
    "forgets drafts": ("i < slot - 1 ? tokens_before[row * width + i]", "i < slot - 1 ? 0"),
    "skips a block's last part": ("end = min(first + share, vocab)", "end = min(first + share - 16, vocab)"),
    "drops the other warps": ("for (int w = 1; w < WARPS; w++)", "for (int w = 1; w < 2; w++)"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_for_the_worse_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    got, wanted = drafted(64, 4, mx.bfloat16, True, tmp_path, change)
    assert not np.array_equal(got, wanted)


def test_equal_logits_draft_the_lower_id(tmp_path: Path) -> None:
    table, project = nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB, bias=False)
    table.weight, project.weight = mx.zeros((VOCAB, 64), mx.float16), mx.zeros((VOCAB, 64), mx.float16)
    chain = GreedyChain.of(Source.of(table), Source.of(project), None)
    assert chain is not None
    base = mx.zeros((1, 2, VOCAB), mx.float16)
    base[0, 1, 130:] = 1.0
    assert greedy(chain, base, mx.array([4]), tmp_path).tolist() == [[0, 130]]


@pytest.mark.parametrize("rank", [8, 48, 96])
def test_heads_that_do_not_divide_among_lanes_are_not_taken(rank: int) -> None:
    table, project = head(rank, 16, mx.float16, DRAFTS)
    kept = GreedyChain.of(Source.of(table), Source.of(project), None)
    assert (kept is None) == (rank > 8)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("right", [True, False])
def test_a_chain_that_drafts_badly_is_found_out(
    bits: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at load, with the head's own operations, or worse ones, in the kernel's place."""
    modules = head(64, bits, mx.float16, DRAFTS)
    chain = GreedyChain.of(Source.of(modules[0]), Source.of(modules[1]), ids_of(DRAFTS))
    assert chain is not None

    def call(self: GreedyChain, base: mx.array, anchors: mx.array) -> mx.array:
        drafts = reference(modules, base, [int(each) for each in np.array(anchors)], self.ids)
        return mx.array(drafts if right else np.full_like(drafts, np.array(self.ids)[3]))

    monkeypatch.setattr(GreedyChain, "__call__", call)
    base = mx.random.normal((1, 2, DRAFTS), key=mx.random.key(0)).astype(mx.float16)
    assert chain.right_here(base) == right
