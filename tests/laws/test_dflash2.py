"""Laws of DFlash 2 beyond those every drafter has: its files, its arithmetic, and what it draws from.

`tests/reference_dflash2.py` is the same drafter once more, from its definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_dspark
from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.catalog.formats.base import Convolution
from mlx_dspark.contracts import Ask, Forward, Logits, Observation, TargetSpec
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.drafters.dflash2.convolution import INPUT, OUTPUT, DynamicConv, convolved
from mlx_dspark.drafters.dflash2.selector import best_candidates
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.engine.loop import VerifyLoop
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.errors import BadCheckpoint, LoadError, UnsupportedModel, UsageError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.kernels.dispatch import CHOICES, STOCK
from mlx_dspark.nn.context import ContextRows
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.state.rows import RowStates
from tests import fakes
from tests.golden import TableTarget
from tests.laws.test_formats import refusal, rewrite, weights_of
from tests.many_texts import draw_texts
from tests.reference_dflash2 import SecondReference, reference_dflash2
from tests.reference_sampler import fit_p_value, reference_text
from tests.tiny import save_tiny
from tests.tiny_dflash2 import save_tiny_dflash2

HIDDEN, VOCAB = 64, 384
EMBED = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(201))
HEAD = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(202)) / 8
WINDOW = {"sliding": (0, 1), "sliding_window": 12, "is_causal": False}
KINDS: dict[str, dict[str, Any]] = {
    "window": WINDOW,
    "window on one layer": WINDOW | {"sliding": (1,)},
    "window narrower than the block": WINDOW | {"sliding_window": 5},
    "no window": {},
    "causal windows": {"sliding": (0, 1), "sliding_window": 12},
    "scaled": WINDOW
    | {
        "section": {
            "output_multiplier": 0.7,
            "final_logit_softcapping": 3.0,
            "input_embedding_scale": 2.0,
            "block_size": 6,
        }
    },
    "four taps of wide groups": WINDOW | {"taps_of_convolution": 4, "group": 32},
    "a tap a group": WINDOW | {"taps_of_convolution": 1, "group": 1},
    "many candidates": WINDOW | {"top_k": 40, "rank": 3},
}


def loaded(folder: Path, *, held_as: str = STOCK, bits: int = 0, **options: Any) -> BlockDrafter:
    drafter = load_drafter(folder, quantize_bits=bits, **options)
    drafter.bind(TableTarget(TargetSpec("table", VOCAB, HIDDEN, 2, context=1 << 20), EMBED, HEAD))
    if held_as != STOCK:
        drafter.hold_weights(held_as, folder)
    return drafter


def features(n: int, seed: int = 0) -> mx.array:
    return mx.random.normal((n, 2 * HIDDEN), key=mx.random.key(3000 + seed))


def observe(drafter: BlockDrafter, rows: ContextRows, *chunks: mx.array) -> None:
    """One ragged chunk per row; what pads the shorter ones is NaN."""
    width = max(chunk.shape[0] for chunk in chunks)
    padded = mx.full((len(chunks), width, 2 * HIDDEN), math.nan)
    for row, chunk in enumerate(chunks):
        padded[row, : chunk.shape[0]] = chunk
    tokens = [[0] * chunk.shape[0] for chunk in chunks]
    drafter.observe(rows, Observation(tokens, padded, [0] * len(chunks), [0] * len(chunks)))


def drafts(
    drafter: BlockDrafter, rows: ContextRows, anchors: Sequence[int], caps: Sequence[int]
) -> list[list[int]]:
    n = len(anchors)
    ask = Ask(anchors, caps, rows.depth, [SamplingParams()] * n, RowNoise.of_seeds([None] * n))
    proposal = drafter.propose(rows, ask)
    return [proposal.tokens[r, :m].tolist() for r, m in enumerate(proposal.lengths)]  # pyright: ignore[reportReturnType]


def reference(folder: Path, context: mx.array, anchor: int) -> SecondReference:
    return reference_dflash2(folder, np.array(context), anchor, embed=np.array(EMBED), head=np.array(HEAD))


def agrees(drafter: BlockDrafter, row: Any, anchor: int, expected: SecondReference) -> None:
    trace = drafter.trace(ContextRows([row]), [anchor])
    size = float(np.abs(expected.hidden).max())
    np.testing.assert_allclose(np.array(trace.hidden[0]), expected.hidden, rtol=0, atol=1e-4 * size)
    logits = np.array(trace.chain.logits[0])
    assert np.array_equal(np.isinf(logits), np.isinf(expected.logits)), "the same candidates"
    np.testing.assert_allclose(logits, expected.logits, rtol=0, atol=1e-3)
    assert trace.chain.tokens[0].tolist() == expected.tokens


# ------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_uneven_rows_equal_the_reference(kind: str, seed: int, tmp_path: Path) -> None:
    """Rows that keep different numbers of drafts, under the window and past it; then one is cut back."""
    folder = save_tiny_dflash2(tmp_path, seed=seed, **KINDS[kind])
    drafter = loaded(folder)
    contexts = [features(60, seed=10 * seed + row) for row in range(3)]
    rows, seen = drafter.new_rows(3), [0, 0, 0]
    for step, kept in enumerate(((9, 1, 30), (1, 3, 8), (5, 4, 1))):
        chunks = [context[at : at + n] for context, at, n in zip(contexts, seen, kept, strict=True)]
        observe(drafter, rows, *chunks)
        seen = [at + n for at, n in zip(seen, kept, strict=True)]
        anchors = [40 * seed + 10 * step + row for row in range(3)]
        truth = [reference(folder, contexts[row][: seen[row]], anchors[row]) for row in range(3)]
        for row in range(3):
            agrees(drafter, rows.rows[row], anchors[row], truth[row])
        expected = [found.tokens[:cap] for found, cap in zip(truth, (99, 2, 4), strict=True)]
        assert drafts(drafter, rows, anchors, [99, 2, 4]) == expected
    capture = rows.capture(2)
    observe(drafter, rows, *(features(7, seed=99) for _ in range(3)))
    cut = capture.rewindable(31) or capture.rewindable(38)
    rows.restore(2, capture, cut)
    assert 0 < cut < 39
    agrees(drafter, rows.rows[2], 5, reference(folder, contexts[2][:cut], 5))


@pytest.mark.parametrize("held_as", CHOICES)
@pytest.mark.parametrize("context", [0, 4, 50])
def test_every_way_of_holding_weights_equals_the_reference(
    held_as: str, context: int, tmp_path: Path
) -> None:
    folder = save_tiny_dflash2(tmp_path, **WINDOW)
    drafter = loaded(folder, held_as=held_as)
    rows = drafter.new_rows()
    if context:
        observe(drafter, rows, features(context))
    agrees(drafter, rows.rows[0], 7, reference(folder, features(context), 7))


# ---------------------------------------------------------------------------------------------- arithmetic


def test_a_convolution_worked_by_hand() -> None:
    conv = DynamicConv(Convolution(taps=2, group=1), hidden=2)
    conv.base_kernel = mx.array([[[1.0, 1.0], [0.5, 0.0]], [[0.0, 2.0], [1.0, 0.0]]])
    y = mx.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    # Coefficients 2 and 3 are those of side 0, tap 1; the second slot alone has an input.
    conv.kernel_projection.weight = mx.zeros((8, 2)).at[2:4].add(mx.eye(2))
    x = mx.array([[[0.0, 0.0], [0.5, 1.0], [0.0, 0.0]]])
    kernels = conv.coefficients(x)
    assert convolved(kernels, INPUT, y).tolist() == [[[1, 2], [4, 6], [6.5, 6]]]
    assert convolved(kernels, OUTPUT, y).tolist() == [[[0, 4], [1, 8], [3, 12]]]


@pytest.mark.parametrize(("vocab", "count"), [(8, 8), (64, 3), (70, 1), (1000, 5), (1024, 16), (5000, 16)])
@pytest.mark.parametrize("levels", [3, 40, 10**6])
def test_the_best_candidates(vocab: int, count: int, levels: int) -> None:
    """Of equal logits, of which few levels make many, the lower ids; in ascending order."""
    rng = np.random.default_rng(vocab + levels)
    logits = rng.integers(levels, size=(2, 3, vocab)).astype(np.float32)
    logits[0, 0, : vocab // 2] = -np.inf
    found = np.array(best_candidates(mx.array(logits), count))
    ranked = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
    np.testing.assert_array_equal(found, np.sort(ranked, axis=-1))


def test_half_precision_weights_score_in_float32(tmp_path: Path) -> None:
    folder = save_tiny_dflash2(tmp_path, **WINDOW, dtype=mx.bfloat16)
    whole, half = loaded(folder), loaded(folder, dtype=mx.bfloat16)
    traces = []
    for drafter in (whole, half):
        rows = drafter.new_rows()
        observe(drafter, rows, features(20))
        traces.append(drafter.trace(rows, [3]))
    assert traces[1].hidden.dtype == mx.bfloat16
    assert traces[1].chain.logits.dtype == mx.float32
    assert alike(traces[1].hidden, traces[0].hidden) > 0.999


def alike(a: mx.array, b: mx.array) -> float:
    """Cosine of two arrays."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.sum(a * b) / mx.sqrt(mx.sum(a**2) * mx.sum(b**2)))


@pytest.mark.parametrize("bits", [4, 8])
def test_convolutions_and_selector_are_never_quantized(bits: int, tmp_path: Path) -> None:
    folder = save_tiny_dflash2(tmp_path, **WINDOW, hidden=HIDDEN, rank=64)
    drafter = loaded(folder, bits=bits)
    plain = {name for name, module in drafter.model.named_modules() if type(module) is nn.Linear}
    assert plain == {
        "candidate_selector.hidden_projection",
        *(f"layers.{i}.{name}_conv.kernel_projection" for i in range(2) for name in ("attention", "mlp")),
    }
    assert isinstance(drafter.model.fc, nn.QuantizedLinear)
    rows = drafter.new_rows()
    observe(drafter, rows, features(9))
    expected = mx.array(reference(folder, features(9), 3).hidden)
    assert alike(drafter.trace(rows, [3]).hidden[0], expected) > 0.8 + 0.01 * bits


# --------------------------------------------------------------------------------------------------- files


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    folder = save_tiny_dflash2(tmp_path, **KINDS["scaled"])
    checkpoint, written = read_drafter(folder), weights_of(folder)
    config = checkpoint.config
    assert (checkpoint.packaging, config.family) == ("DFlash 2", "dflash2")
    assert (config.block_size, config.first_slot, config.max_draft) == (6, 1, 5)
    assert (config.layer_causal, config.layer_windows) == ((False, False), (12, 12))
    assert (config.selector, config.convolution) == (
        read_drafter(save_tiny_dflash2(tmp_path / "other")).config.selector,
        Convolution(2, 4),
    )
    assert (config.output_multiplier, config.softcap, config.embedding_scale) == (0.7, 3.0, 2.0)
    assert checkpoint.weights.keys() == written.keys()
    assert all(bool(mx.array_equal(checkpoint.weights[name], written[name])) for name in written)


def test_the_published_count_of_tensors(tmp_path: Path) -> None:
    assert len(read_drafter(save_tiny_dflash2(tmp_path, layers=5, sliding=range(5))).weights) == 81


@pytest.mark.parametrize("keys", [{"architectures": ["DFlashDraftModel"]}, {"architectures": None}])
def test_a_selector_is_enough_to_know_it_by(keys: dict[str, Any], tmp_path: Path) -> None:
    assert read_drafter(save_tiny_dflash2(tmp_path, **keys)).packaging == "DFlash 2"


def test_two_claimants_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_dflash2(tmp_path, target_layer_ids=[0, 1], architectures=["Qwen3DSparkModel"])
    assert "two packagings, deepspec and DFlash 2" in refusal(UnsupportedModel, folder)


@pytest.mark.parametrize(
    "key", ["selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size", "target_layer_ids"]
)
def test_a_head_without_its_second_half_is_never_run_as_dflash(key: str, tmp_path: Path) -> None:
    assert key in refusal(BadCheckpoint, save_tiny_dflash2(tmp_path, section={key: None}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("selector_rank", 0),
        ("selector_top_k", 385),
        ("selector_top_k", "16"),
        ("conv_kernel_size", 2.0),
        ("conv_kernel_size", 10**9),
        ("conv_group_size", 3),
        ("conv_group_size", 0),
        ("block_size", 1),
        ("mask_token_id", 384),
        ("output_multiplier", 0),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any, tmp_path: Path) -> None:
    sentence = refusal(BadCheckpoint, save_tiny_dflash2(tmp_path, section={key: value}))
    assert sentence.startswith(f"{key} in ")


def test_a_missing_an_extra_and_a_misshaped_tensor_are_named(tmp_path: Path) -> None:
    folder = save_tiny_dflash2(tmp_path)
    weights = weights_of(folder)
    for name, weight in weights.items():
        rest = {key: value for key, value in weights.items() if key != name}
        assert f"lacks {name}" in refusal(BadCheckpoint, rewrite(folder, rest))
        grown = mx.zeros((*weight.shape[:-1], weight.shape[-1] + 1))
        sentence = refusal(BadCheckpoint, rewrite(folder, weights | {name: grown}))
        assert f"{name} of shape {list(grown.shape)} in place of {list(weight.shape)}" in sentence
    for name in ("lm_head.weight", "layers.2.mlp_conv.base_kernel", "markov_head.markov_w3.weight"):
        sentence = refusal(LoadError, rewrite(folder, weights | {name: mx.zeros((2, 2))}))
        assert name in sentence or "Markov head" in sentence


@pytest.mark.parametrize(
    "name", ["layers.1.mlp_conv.base_kernel", "candidate_selector.predecessor_codebook", "norm.weight"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(name: str, bad: float, tmp_path: Path) -> None:
    folder = save_tiny_dflash2(tmp_path)
    weights = weights_of(folder)
    weights[name] = mx.where(mx.arange(weights[name].size).reshape(weights[name].shape) == 3, bad, 1.0)
    assert name in refusal(BadCheckpoint, rewrite(folder, weights))


def test_it_has_no_confidence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no confidence head"):
        load_drafter(save_tiny_dflash2(tmp_path), confidence_threshold=0.3)


# ------------------------------------------------------------------------------------------------ sampling

SMALL, LENGTH, ROWS, BATCH, FLOOR = 8, 3, 5_000, 500, 1e-4
PROMPT = (3,)
_rng = np.random.default_rng(21)
TABLE = _rng.normal(size=(SMALL, SMALL)) * 1.2


class TappedTable(fakes.TableTarget):
    """A table whose tapped features and lent tables are random: its drafter knows little."""

    def __init__(self) -> None:
        super().__init__(mx.array(TABLE, dtype=mx.float32))
        self.spec = TargetSpec("table", SMALL, HIDDEN, 2, context=512)
        keys = mx.random.split(mx.random.key(31), 3)
        self._features = mx.random.normal((SMALL, 2 * HIDDEN), key=keys[0])
        self._embed = mx.random.normal((SMALL, HIDDEN), key=keys[1])
        self._head = mx.random.normal((SMALL, HIDDEN), key=keys[2]) / 8

    def forward(
        self,
        tokens: mx.array,
        rows: RowStates,
        *,
        taps: tuple[int, ...] = (),
        logits: Logits | mx.array = Logits.ALL,
    ) -> Forward:
        return Forward(super().forward(tokens, rows, logits=logits).logits, self._features[tokens])

    def embed(self, tokens: mx.array) -> mx.array:
        return self._embed[tokens]

    def unembed(self, hidden: mx.array) -> mx.array:
        return hidden @ self._head.T


@pytest.mark.parametrize(
    ("sampling", "seeded"),
    [
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=0.8, top_k=6, top_p=0.9, repetition_penalty=1.2), False),
        (SamplingParams(temperature=1.0), True),
    ],
)
def test_committed_text_has_the_plain_samplers_distribution(
    sampling: SamplingParams, seeded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the vocabulary is never drafted in a slot, and must come all the same."""
    options = {"layers": 1, "vocab": SMALL, "block_size": 3, "sliding": (0,), "sliding_window": 2}
    drafter = load_drafter(save_tiny_dflash2(tmp_path, is_causal=False, **options), quantize_bits=0)
    target = TappedTable()
    drafter.bind(target)
    drawn = draw_texts(
        VerifyLoop(target, drafter),
        FixedCaps({"dflash": drafter.max_draft}),
        PROMPT,
        LENGTH,
        sampling,
        rows=ROWS,
        batch=BATCH,
        seeded=seeded,
        monkeypatch=monkeypatch,
    )
    assert 0 < drawn.accepted < drawn.drafted
    assert fit_p_value(drawn.texts, reference_text(TABLE, PROMPT, LENGTH, sampling)) > FLOOR


# ------------------------------------------------------------------------------------------------- sessions


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_session_takes_it_as_dflash(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of plain decoding, greedy or with a seed."""
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    save_tiny(tmp_path / "model")
    save_tiny_dflash2(tmp_path / "drafter", **WINDOW)

    def result_of(**settings: Any) -> mlx_dspark.Result:
        with mlx_dspark.load(tmp_path / "model", **settings) as session:
            options = {"max_new_tokens": 24, "chat_template": False, "temperature": temperature, "seed": 5}
            return session.generate("a" * 20, **options)

    plain = result_of(mode="baseline")
    drafted = result_of(mode="dflash", drafter=tmp_path / "drafter", max_draft=3)
    assert (drafted.mode, set(drafted.sources)) == ("dflash", {"dflash"})
    assert drafted.drafted > 0
    assert drafted.token_ids == plain.token_ids
