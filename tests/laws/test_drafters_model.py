"""Laws of the model drafters: they equal the reference, and neither caches, chunks, rows nor caps show."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.contracts import Ask, Drafter, Observation, Source, TargetSpec
from mlx_dspark.drafters.block import ABSORB_AT, BlockDrafter
from mlx_dspark.drafters.draw import DraftVocab, GreedyDraw, SampledDraw
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.foundation.errors import DrafterMismatch, UsageError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.kernels.dispatch import CHOICES, STOCK
from mlx_dspark.nn.block import BlockMask
from mlx_dspark.nn.context import STEP, ContextRows
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.probs import MappedVocab, PointMass
from mlx_dspark.nn.rope import Rope, inverse_frequencies
from mlx_dspark.nn.sampling import distribution
from tests.golden import TableTarget, cases, check_case, main
from tests.reference_dflash2 import reference_dflash2
from tests.reference_drafter import Reference, reference_draft
from tests.tiny_dflash2 import save_tiny_dflash2
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_packagings import save_tiny_nemotron

HIDDEN, VOCAB, LAYERS, TAPS = 64, 384, 2, 2
GOLDEN = Path(__file__).parents[1] / "golden"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

KINDS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "vanilla": (save_tiny_dspark, {}),
    "gated": (save_tiny_dspark, {"markov": "gated"}),
    "rnn": (save_tiny_dspark, {"markov": "rnn"}),
    "rank 0": (save_tiny_dspark, {"markov": "none"}),
    "no confidence": (save_tiny_dspark, {"confidence": False}),
    "plain confidence": (save_tiny_dspark, {"confidence_with_markov": False}),
    "gemma4": (save_tiny_dspark, {"backbone": "gemma4"}),
    "gemma4 values": (save_tiny_dspark, {"backbone": "gemma4", "values_from_keys": False}),
    "reduced": (save_tiny_dspark, {"draft_vocab": 96}),
    "borrowed": (save_tiny_dspark, {"own_embedding": False, "own_head": False}),
    "tied": (save_tiny_dspark, {"own_head": False, "tie_word_embeddings": True}),
    "biased": (save_tiny_dspark, {"bias": True}),
    "anchor slot silent": (save_tiny_dspark, {"logits_start": 1}),
    "embedding tap": (save_tiny_dspark, {"taps": (-1, 1)}),
    "dspark sliding": (
        save_tiny_dspark,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    ),
    "sinks": (save_tiny_nemotron, {}),
    "dflash": (save_tiny_dflash, {}),
    "dflash sliding": (save_tiny_dflash, {"sliding": (0, 1)}),
    "dflash one sliding": (save_tiny_dflash, {"sliding": (1,), "sliding_window": 12}),
    "dflash window 1": (save_tiny_dflash, {"sliding": (0,), "sliding_window": 1}),
    "dflash causal": (save_tiny_dflash, {"is_causal": True}),
    "dflash two-way sliding": (save_tiny_dflash, {"sliding": (0, 1), "is_causal": False}),
    "dflash yarn": (save_tiny_dflash, {"rope_parameters": YARN}),
    "dflash scaled": (
        save_tiny_dflash,
        {"final_logit_softcapping": 3.0, "output_multiplier": 0.5, "input_embedding_scale": 2.0},
    ),
    "dflash 2": (save_tiny_dflash2, {"sliding": (0, 1), "is_causal": False}),
    "dflash 2 causal": (save_tiny_dflash2, {"sliding": (0, 1), "taps_of_convolution": 3}),
}
CAUSAL = ("sinks", "dflash sliding", "dflash causal", "dflash 2 causal")
every_kind = pytest.mark.parametrize("kind", KINDS)

EMBED = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(101))
HEAD = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(102)) / 8


def target(**changes: Any) -> TableTarget:
    spec = TargetSpec("table", VOCAB, HIDDEN, LAYERS, context=1 << 20)
    return TableTarget(replace(spec, **changes), EMBED, HEAD)


def saved(kind: str, folder: Path) -> Path:
    save, options = KINDS[kind]
    return save(folder / "drafter", hidden=HIDDEN, vocab=VOCAB, target_layers=LAYERS, **options)


def loaded(kind: str, folder: Path, quantize_bits: int = 0, **options: Any) -> BlockDrafter:
    drafter = load_drafter(saved(kind, folder), quantize_bits=quantize_bits, **options)
    drafter.bind(target())
    return drafter


def features(n: int, seed: int = 0) -> mx.array:
    return mx.random.normal((n, TAPS * HIDDEN), key=mx.random.key(1000 + seed))


def observe(drafter: BlockDrafter, rows: ContextRows, *chunks: mx.array) -> None:
    """One ragged chunk per row; what pads the shorter ones is NaN."""
    width = max(chunk.shape[0] for chunk in chunks)
    padded = mx.full((len(chunks), width, TAPS * HIDDEN), math.nan)
    for row, chunk in enumerate(chunks):
        padded[row, : chunk.shape[0]] = chunk
    tokens = [[0] * chunk.shape[0] for chunk in chunks]
    drafter.observe(rows, Observation(tokens, padded, [0] * len(chunks), [0] * len(chunks)))


def contexts(drafter: BlockDrafter, *chunks: mx.array) -> ContextRows:
    rows = drafter.new_rows(len(chunks))
    observe(drafter, rows, *chunks)
    return rows


def ask(
    rows: ContextRows,
    anchors: Sequence[int],
    caps: Sequence[int],
    sampling: Sequence[SamplingParams] | None = None,
    seeds: Sequence[int | None] | None = None,
) -> Ask:
    n = len(anchors)
    noise = RowNoise.of_seeds(seeds or [None] * n)
    return Ask(anchors, caps, rows.depth, sampling or [SamplingParams()] * n, noise)


def drafts(
    drafter: BlockDrafter, rows: ContextRows, anchors: Sequence[int], caps: Sequence[int]
) -> list[list[int]]:
    proposal = drafter.propose(rows, ask(rows, anchors, caps))
    return [proposal.tokens[r, :n].tolist() for r, n in enumerate(proposal.lengths)]  # pyright: ignore[reportReturnType]


def reference(kind: str, folder: Path, context: mx.array, anchor: int, **options: Any) -> Reference:
    if KINDS[kind][0] is save_tiny_dflash2:
        return second_reference(saved(kind, folder), context, anchor, **options)
    checkpoint = read_drafter(saved(kind, folder))
    return reference_draft(checkpoint, context, anchor, embed=EMBED, head=HEAD, **options)


def second_reference(folder: Path, context: mx.array, anchor: int, **options: Any) -> Reference:
    tables: dict[str, Any] = {"embed": np.array(EMBED), "head": np.array(HEAD)}
    found = reference_dflash2(folder, np.array(context), anchor, **tables, **options)
    return Reference(mx.array(found.hidden), mx.array(found.logits), found.tokens, [])


def close(found: mx.array, expected: mx.array, tolerance: float = 1e-4) -> bool:
    """Equal infinities count as close."""
    apart = mx.where(found == expected, 0.0, mx.abs(found - expected))
    size = mx.where(mx.isinf(expected), 0.0, mx.abs(expected))
    return bool(mx.max(apart) <= tolerance * mx.max(size))


# ---------------------------------------------------------------------------------------- reference values


@pytest.mark.parametrize("held_as", CHOICES)
@pytest.mark.parametrize("case", cases(GOLDEN), ids=lambda case: case.name)
def test_golden(case: Path, held_as: str) -> None:
    verdict = check_case(case, held_as)
    assert not verdict.fault, verdict


def test_golden_script_fails_when_it_must(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = tmp_path / "cases" / "dspark_vanilla"
    shutil.copytree(GOLDEN / "dspark_vanilla", case)
    assert main([str(tmp_path / "cases"), str(case)]) == 0
    assert main([str(tmp_path)]) == main([str(tmp_path / "absent")]) == 1
    io = mx.load(str(case / "io.safetensors"))
    assert isinstance(io, dict)
    for key, value in io.items():
        changed = value + (1 if "tokens" in key else 0.01) if "round1" in key else value
        mx.save_safetensors(str(case / "io.safetensors"), io | {key: changed})
        assert main([str(case)]) == int("round1" in key), key
    (case / "meta.json").unlink()
    assert main([str(tmp_path / "cases")]) == 1
    assert "lacks meta.json" in capsys.readouterr().out


@every_kind
@pytest.mark.parametrize("context", [0, 1, 5, 37])
def test_equals_the_reference(kind: str, context: int, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path)
    rows = contexts(drafter, features(context)) if context else drafter.new_rows()
    expected = reference(kind, tmp_path, features(context), anchor=7)
    trace = drafter.trace(rows, [7])
    assert close(trace.hidden[0], expected.hidden)
    assert close(trace.chain.logits[0], expected.logits)
    if trace.chain.confidence_logits is not None:
        assert close(trace.chain.confidence_logits[0], mx.array(expected.confidence_logits))
    assert trace.chain.tokens[0].tolist() == expected.tokens
    assert drafts(drafter, rows, [7], [99]) == [expected.tokens]


# ------------------------------------------------------------------------------------ what must not show


@every_kind
def test_rounds_equal_one_forward_over_all_context(kind: str, tmp_path: Path) -> None:
    drafter, everything = loaded(kind, tmp_path), features(60)
    rows, seen = drafter.new_rows(), 0
    for anchor, kept in enumerate((21, 1, 8, 3, 5, 1, 2)):
        observe(drafter, rows, everything[seen : seen + kept])
        seen += kept
        fresh = contexts(drafter, everything[:seen])
        assert drafts(drafter, rows, [anchor], [9]) == drafts(drafter, fresh, [anchor], [9])
        assert close(drafter.trace(rows, [anchor]).hidden, drafter.trace(fresh, [anchor]).hidden, 1e-5)


@every_kind
@pytest.mark.parametrize("chunk", [1, 7, ABSORB_AT, ABSORB_AT + 1])
def test_chunks_do_not_show(kind: str, chunk: int, tmp_path: Path) -> None:
    drafter, context = loaded(kind, tmp_path), features(75)
    rows = drafter.new_rows()
    for begin in range(0, 75, chunk):
        observe(drafter, rows, context[begin : begin + chunk])
    assert rows.depth == [75]
    whole = drafter.trace(contexts(drafter, context), [3])
    assert close(drafter.trace(rows, [3]).chain.logits, whole.chain.logits, 1e-5)


@pytest.mark.parametrize("held_as", CHOICES)
@every_kind
def test_a_batch_equals_its_rows(kind: str, held_as: str, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path)
    if held_as != STOCK:
        drafter.hold_weights(held_as, tmp_path)
    chunks = [
        [features(n, seed=10 * row + n) for n in ns]
        for row, ns in enumerate([(5, 1, 3), (1, 4, 0), (40, 0, 2)])
    ]
    batch, alone = drafter.new_rows(3), [drafter.new_rows() for _ in range(3)]
    for step, anchor in enumerate((4, 5, 6)):
        observe(drafter, batch, *(row[step] for row in chunks))
        for single, row in zip(alone, chunks, strict=True):
            observe(drafter, single, row[step])
        found = drafts(drafter, batch, [anchor, anchor + 1, anchor + 2], [9, 2, 4])
        for r, (single, cap) in enumerate(zip(alone, (9, 2, 4), strict=True)):
            assert [found[r]] == drafts(drafter, single, [anchor + r], [cap])
    assert batch.depth == [9, 5, 42]


@every_kind
def test_join_and_select(kind: str, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path)
    parts = [features(n, seed=n) for n in (6, 33, 2)]
    joined = contexts(drafter, parts[0])
    joined.join(contexts(drafter, parts[1], parts[2]))
    assert joined.depth == [6, 33, 2]
    expected = [drafts(drafter, contexts(drafter, part), [9], [9])[0] for part in parts]
    assert drafts(drafter, joined, [9] * 3, [9] * 3) == expected
    joined.select([2, 0])
    assert drafts(drafter, joined, [9] * 2, [9] * 2) == [expected[2], expected[0]]


@every_kind
def test_neighbours_without_a_cap(kind: str, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path)
    rows = contexts(drafter, features(6), features(9, seed=1), features(4, seed=2))
    full = drafts(drafter, rows, [1, 2, 3], [9, 9, 9])
    assert drafts(drafter, rows, [1, 2, 3], [0, 9, 0]) == [[], full[1], []]
    proposal = drafter.propose(rows, ask(rows, [1, 2, 3], [0, 0, 0]))
    assert proposal.lengths == (0, 0, 0)
    assert proposal.tokens.shape == (3, 0)


@every_kind
@pytest.mark.parametrize("cap", [1, 3])
def test_a_cap_only_shortens(kind: str, cap: int, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path)
    rows = contexts(drafter, features(20))
    (full,) = drafts(drafter, rows, [5], [99])
    assert len(full) == drafter.max_draft
    assert drafts(drafter, rows, [5], [cap]) == [full[:cap]]


def test_waiting_features_are_absorbed_unasked(tmp_path: Path) -> None:
    drafter = loaded("vanilla", tmp_path)
    rows = drafter.new_rows()
    for step in range(ABSORB_AT + 3):
        observe(drafter, rows, features(1, seed=step))
    assert rows.depth == [ABSORB_AT + 3]
    assert rows.rows[0].absorbed == ABSORB_AT


# -------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize(("kind", "causal"), [(kind, kind in CAUSAL) for kind in KINDS])
def test_later_slots_matter_unless_causal(kind: str, causal: bool, tmp_path: Path) -> None:
    """A causal block may be cut short, and is; a bidirectional one depends on every mask slot."""
    drafter = loaded(kind, tmp_path)
    rows = contexts(drafter, features(11))
    assert drafter.model.causal == causal
    size, kept = drafter.config.block_size, 3
    block = mx.random.normal((1, size, HIDDEN), key=mx.random.key(5))
    whole = drafter.model(block, rows.rows)
    perturbed = mx.concatenate([block[:, :kept], block[:, kept:] + 1], axis=1)
    same = bool(mx.all(drafter.model(perturbed, rows.rows)[:, :kept] == whole[:, :kept]))
    assert same == causal
    assert close(drafter.model(block[:, :kept], rows.rows), whole[:, :kept], 1e-5) == causal


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize("context", [0, 3, 20])
def test_masks(causal: bool, window: int | None, context: int) -> None:
    block, mask = 5, BlockMask(causal, window)
    span = mask.span(0)
    kept = context if span is None else min(span, context)
    found = mask.of(kept, block)
    for slot in range(block):
        for key in range(-kept, block):
            near = window is None or abs(slot - key) < window
            seen = near and (key <= slot or not causal)
            if isinstance(found, mx.array):
                assert bool(found[slot, key + kept]) == seen
            else:
                assert seen == (key <= slot or found is None)
    dropped = range(-context, -kept)
    assert all(window is not None and slot - key >= window for key in dropped for slot in range(block))


@pytest.mark.parametrize("window", [4, 16])
def test_the_drafting_window(window: int, tmp_path: Path) -> None:
    context = features(50)
    drafter = loaded("vanilla", tmp_path, window=window)
    trace = drafter.trace(contexts(drafter, context), [3])
    assert close(trace.hidden[0], reference("vanilla", tmp_path, context, 3, window=window).hidden)
    assert not close(trace.hidden[0], reference("vanilla", tmp_path, context, 3).hidden)


@pytest.mark.parametrize("kind", ["dflash sliding", "dflash causal", "dflash two-way sliding"])
def test_masked_layers_ignore_the_drafting_window(kind: str, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path, window=2)
    trace = drafter.trace(contexts(drafter, features(50)), [3])
    assert close(trace.hidden[0], reference(kind, tmp_path, features(50), 3).hidden)


@pytest.mark.parametrize("kind", ["vanilla", "gemma4", "dflash sliding", "dflash one sliding"])
def test_long_contexts(kind: str, tmp_path: Path) -> None:
    """Past several buffer growths, and past the shedding of sliding layers, positions stay absolute."""
    drafter, context = loaded(kind, tmp_path, window=64), features(3 * STEP + 50)
    rows = drafter.new_rows()
    for begin in range(0, context.shape[0], 45):
        observe(drafter, rows, context[begin : begin + 45])
        drafter.propose(rows, ask(rows, [1], [2]))
    expected = reference(kind, tmp_path, context, 3, window=64)
    assert close(drafter.trace(rows, [3]).hidden[0], expected.hidden)
    layers = rows.rows[0].layers
    assert all(layer.first + layer.count == rows.depth[0] for layer in layers)
    for layer, window in zip(layers, drafter.config.layer_windows, strict=True):
        assert layer.first == 0 if window is None else layer.count <= window + STEP
    capture = rows.capture(0)
    observe(drafter, rows, features(300, seed=8))
    rows.restore(0, capture)
    assert close(drafter.trace(rows, [3]).hidden[0], expected.hidden)


# ---------------------------------------------------------------------------------------------- captures


@every_kind
@pytest.mark.parametrize("depth", [0, 9, 26, 30])
def test_captures(kind: str, depth: int, tmp_path: Path) -> None:
    """A capture is unmoved by later writes, and restores to any depth within reach."""
    drafter, context = loaded(kind, tmp_path), features(30)
    rows = contexts(drafter, context[:26])
    drafter.propose(rows, ask(rows, [1], [2]))
    observe(drafter, rows, context[26:])
    capture = rows.capture(0)
    observe(drafter, rows, features(20, seed=3))
    drafter.propose(rows, ask(rows, [1], [9]))
    reached = capture.rewindable(depth)
    rows.restore(0, capture, reached)
    assert rows.depth == [reached]
    fresh = contexts(drafter, context[:reached]) if reached else drafter.new_rows()
    more = features(3, seed=4)
    for state in (rows, fresh):
        observe(drafter, state, more)
    assert drafts(drafter, rows, [8], [9]) == drafts(drafter, fresh, [8], [9])
    rows.restore(0, capture)
    assert drafts(drafter, rows, [8], [9]) == drafts(drafter, contexts(drafter, context), [8], [9])


def test_a_shed_context_cannot_be_rewound_far(tmp_path: Path) -> None:
    drafter = loaded("dflash sliding", tmp_path)
    capture = contexts(drafter, features(300)).capture(0)
    assert capture.rewindable(300) == 300
    assert capture.rewindable(200) == 0
    with pytest.raises(ValueError, match="cannot be restored at 200"):
        drafter.new_rows().restore(0, capture, 200)


# ---------------------------------------------------------------------------------------------- sampling

WARM = SamplingParams(temperature=0.8, top_k=12, top_p=0.95)
HOT = SamplingParams(temperature=1.5, min_p=0.01)


def drawn_by(kind: str, sampling: SamplingParams) -> SamplingParams:
    """What a drafter heeds of a request's sampling: all of it, or DFlash 2 the temperature alone."""
    second = KINDS[kind][0] is save_tiny_dflash2
    return SamplingParams(temperature=sampling.temperature) if second else sampling


@every_kind
def test_q_is_what_the_drafts_were_drawn_from(kind: str, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path)
    context = [features(12), features(7, seed=1), features(9, seed=2)]
    sampling, seeds = [WARM, SamplingParams(), HOT], [1, 2, None]
    rows = contexts(drafter, *context)
    request = ask(rows, [5, 6, 7], [99] * 3, sampling, seeds)
    proposal = drafter.propose(rows, request)
    assert [proposal.q.point(row) for row in range(3)] == [False, True, False]
    noise = request.noise.draft_gumbel(mx.array([[13 + i for i in range(8)]] * 3), VOCAB)
    d2t = read_drafter(saved(kind, tmp_path)).d2t
    ids = mx.arange(drafter.config.draft_vocab)
    ids = ids if d2t is None else ids + d2t
    for row in range(3):
        forced = [int((ids == token).argmax()) for token in proposal.tokens[row]]
        replay = reference(kind, tmp_path, context[row], 5 + row, choose=lambda i, _, f=forced: f[i])
        expected = distribution(replay.logits[None], [drawn_by(kind, sampling[row])])[0]
        for slot in range(drafter.max_draft):
            q = proposal.q.at(mx.array([slot] * 3))[row]
            assert abs(float(q.sum()) - 1) < 1e-5
            assert close(q[ids], expected[slot], 1e-3)
            assert float(q.sum() - q[ids].sum()) == pytest.approx(0, abs=1e-6)
            if row == 0:
                drawn = mx.argmax(mx.log(expected[slot]) + noise[0, slot][ids])
                assert int(drawn) == forced[slot]


@every_kind
def test_a_seeded_row_samples_alike_alone_and_in_a_batch(kind: str, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path)
    rows = contexts(drafter, features(5), features(7, seed=1), features(9, seed=2))
    batch = drafter.propose(rows, ask(rows, [5, 6, 7], [0, 9, 9], [HOT] * 3, [None, 4, None]))
    single = contexts(drafter, features(7, seed=1))
    alone = drafter.propose(single, ask(single, [6], [9], [HOT], [4]))
    assert batch.tokens[1].tolist() == alone.tokens[0].tolist()
    assert batch.lengths == (0, alone.lengths[0], alone.lengths[0])
    for slot in range(alone.lengths[0]):
        q = batch.q.at(mx.array([slot] * 3))
        assert close(q[1], alone.q.at(mx.array([slot]))[0], 1e-3)
        assert close(q.sum(axis=-1), mx.ones(3), 1e-5)
    assert [batch.q.point(row) for row in (1, 2)] == [False, False]


def test_greedy_rows_compute_no_probabilities(tmp_path: Path) -> None:
    drafter = loaded("vanilla", tmp_path)
    rows = contexts(drafter, features(5), features(7))
    assert isinstance(drafter.propose(rows, ask(rows, [5, 6], [3, 3])).q, PointMass)


@pytest.mark.parametrize("sampling", [HOT, SamplingParams(temperature=0.7, top_p=0.8)])
def test_drafts_follow_q(sampling: SamplingParams) -> None:
    """Chi-square of 60,000 drafts over 12 tokens; the floor is p = 1e-4."""
    rows, width, vocab = 60, 1000, 12
    logits = mx.random.normal((vocab,), key=mx.random.key(9)) * 1.5
    draw = SampledDraw(DraftVocab(vocab), [sampling] * rows, RowNoise.of_seeds(range(rows)), [0] * rows)
    tokens = draw(0, mx.broadcast_to(logits, (rows, width, vocab)))
    q = distribution(logits[None, None], [sampling])[0, 0]
    counts = mx.sum(tokens[..., None] == mx.arange(vocab), axis=(0, 1)).astype(mx.float32)
    expected = q * rows * width
    assert float(mx.max(mx.where(q == 0, counts, 0))) == 0
    statistic = float(mx.sum(mx.where(q > 0, (counts - expected) ** 2 / mx.maximum(expected, 1e-9), 0)))
    freedom = int(mx.sum(q > 0)) - 1
    # Wilson-Hilferty: the cube root of chi-square over its freedom is nearly normal; 1e-4 is at 3.72.
    deviations = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviations < 3.72


def test_a_reduced_vocabulary_maps_to_target_ids() -> None:
    vocab = DraftVocab(12, mx.array([2, 4, 7]))
    assert GreedyDraw(vocab)(0, mx.array([[[3.0, 1, 1], [1, 3, 1], [1, 1, 3]]])).tolist() == [[2, 5, 9]]
    q = MappedVocab(mx.array([[[0.2, 0.3, 0.5]]]), mx.array([2, 4, 7]), 12).at(mx.array([0]))[0]
    assert [round(float(x), 6) for x in q] == [0, 0, 0.2, 0, 0, 0.3, 0, 0, 0, 0.5, 0, 0]


# -------------------------------------------------------------------------------------------- confidence


def test_confidence_cuts_drafts(tmp_path: Path) -> None:
    """The longest draft whose product of confidences reaches the threshold, one at least."""
    free = loaded("vanilla", tmp_path)
    chunks = [features(n, seed=n) for n in (6, 11, 3)]
    full = drafts(free, contexts(free, *chunks), [1, 2, 3], [9, 9, 2])
    lengths = set()
    for threshold in (0.02, 0.1, 0.3, 0.7, 1.0):
        drafter = loaded("vanilla", tmp_path, confidence_threshold=threshold)
        assert drafter.sources[0].own_length
        rows = contexts(drafter, *chunks)
        proposal = drafter.propose(rows, ask(rows, [1, 2, 3], [9, 9, 2]))
        assert rows.confidences is not None
        for row, cap in enumerate((7, 7, 2)):
            products = [float(mx.prod(rows.confidences[row, : n + 1])) for n in range(7)]
            reach = max([1] + [n + 1 for n in range(7) if products[n] >= threshold])
            assert proposal.lengths[row] == min(cap, reach)
            assert (
                proposal.tokens[row, : proposal.lengths[row]].tolist() == full[row][: proposal.lengths[row]]
            )
        assert proposal.tokens.shape[1] == max(proposal.lengths)
        lengths.add(proposal.lengths)
    assert len(lengths) > 1


# ------------------------------------------------------------------------------------------- quantization


@every_kind
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_drafters_run_and_repeat(kind: str, bits: int, tmp_path: Path) -> None:
    drafter = loaded(kind, tmp_path, quantize_bits=bits)
    rows = contexts(drafter, features(9))
    assert drafts(drafter, rows, [3], [9]) == drafts(drafter, contexts(drafter, features(9)), [3], [9])
    trace = drafter.trace(rows, [3]).hidden[0]
    exact = reference(kind, tmp_path, features(9), 3).hidden
    assert float(mx.sum(trace * exact) / mx.sqrt(mx.sum(trace**2) * mx.sum(exact**2))) > 0.8 + 0.01 * bits


def test_what_is_quantized(tmp_path: Path) -> None:
    """Every linear layer and embedding whose width is a multiple of the group; never a norm."""
    model = loaded("vanilla", tmp_path, quantize_bits=4).model
    kinds = {name: type(module) for name, module in model.named_modules()}
    packed = {name for name, kind in kinds.items() if kind in (nn.QuantizedLinear, nn.QuantizedEmbedding)}
    plain = {name for name, kind in kinds.items() if kind in (nn.Linear, nn.Embedding)}
    assert plain == {"markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"}
    assert {"fc", "embed_tokens", "lm_head", "layers.1.self_attn.o_proj", "layers.0.mlp.down_proj"} <= packed
    unpacked = loaded("vanilla", tmp_path).model
    assert not any(hasattr(module, "bits") for _, module in unpacked.named_modules())


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_checkpoints_compute_in_float32_on_the_cpu(dtype: mx.Dtype, tmp_path: Path) -> None:
    drafter = load_drafter(save_tiny_dspark(tmp_path / "half", dtype=dtype))
    drafter.bind(target())
    rows = contexts(drafter, features(9))
    if mx.default_device().type == mx.DeviceType.cpu:
        assert drafter.trace(rows, [3]).hidden.dtype == mx.float32
    assert drafter.dtype != mx.float16


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"hidden": 128}, "hidden_size", ("64", "128")),
        ({"vocab": 400}, "vocab_size", ("384", "400")),
        ({"layers": 5}, "num_target_layers", ("2", "5")),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    change: dict[str, Any], field: str, values: tuple[str, str], tmp_path: Path
) -> None:
    drafter = load_drafter(saved("vanilla", tmp_path))
    with pytest.raises(DrafterMismatch, match=field) as caught:
        drafter.bind(target(**change))
    assert caught.value.field == field
    assert all(value in caught.value.sentence for value in values)
    assert caught.value.next_step


def test_taps_beyond_the_target_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path / "d", taps=(0, 2), num_target_layers=None)
    with pytest.raises(
        DrafterMismatch, match="target_layer_ids reads layer 2, and the target has layers 0 to 1"
    ):
        load_drafter(folder).bind(target())


def test_a_drafter_must_be_bound(tmp_path: Path) -> None:
    drafter = load_drafter(saved("borrowed", tmp_path), quantize_bits=0)
    with pytest.raises(RuntimeError, match="not bound"):
        drafter.trace(contexts(drafter, features(3)), [1])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantize_bits", 3),
        ("group_size", 48),
        ("window", -1),
        ("confidence_threshold", 1.5),
        ("confidence_threshold", math.nan),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=option):
        load_drafter(saved("vanilla", tmp_path), **{option: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["no confidence", "dflash"])
def test_a_threshold_needs_a_confidence_head(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no confidence head"):
        load_drafter(saved(kind, tmp_path), confidence_threshold=0.3)


def test_it_is_a_drafter(tmp_path: Path) -> None:
    drafter: Drafter = loaded("vanilla", tmp_path)
    assert (drafter.name, drafter.taps, drafter.max_draft) == ("dspark", (0, 1), 7)
    assert drafter.sources == (Source("dspark", 7),)


def test_misuse_is_loud(tmp_path: Path) -> None:
    drafter = loaded("vanilla", tmp_path)
    rows = contexts(drafter, features(5))
    with pytest.raises(ValueError, match="row 0 is at 6"):
        drafter.propose(rows, replace(ask(rows, [1], [3]), positions=[6]))
    with pytest.raises(ValueError, match="needs the features"):
        drafter.observe(rows, Observation([[1]], None, [0], [0]))


# ------------------------------------------------------------------------------------------------- rotary


def test_proportional_rope_turns_a_quarter() -> None:
    rope = Rope(512, 1e6, "proportional", {"partial_rotary_factor": 0.25})
    turned = rope(mx.eye(512)[None, None, :, None, :].reshape(1, 512, 1, 512), 1)[0, :, 0]
    assert float(turned[0, 0]) == pytest.approx(0.540302, abs=1e-6)
    assert float(turned[0, 256]) == pytest.approx(0.841471, abs=1e-6)
    assert float(turned[63, 63]) == pytest.approx(0.999443, abs=1e-6)
    assert float(turned[63, 319]) == pytest.approx(0.033370, abs=1e-6)
    for still in (64, 320):
        assert turned[still].tolist() == mx.eye(512)[still].tolist()


def test_yarn_frequencies() -> None:
    options = {"factor": 32.0, "original_max_position_embeddings": 8192.0}
    inverse, magnitude = inverse_frequencies(128, 1e7, "yarn", options)
    assert magnitude == pytest.approx(1.3465736)
    known = {0: 1.0, 14: 1e7 ** (-28 / 128), 16: 0.01548585, 24: 8.3986e-4, 28: 8.29882e-5, 31: 1.271233e-5}
    for pair, value in (known | {63: 4.01999e-9}).items():
        assert inverse[pair] == pytest.approx(value, rel=1e-5)


def test_other_frequencies() -> None:
    plain, _ = inverse_frequencies(16, 1e4, "default", {})
    assert inverse_frequencies(16, 1e4, "linear", {"factor": 4.0})[0] == [f / 4 for f in plain]
    options = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128.0,
    }
    found, magnitude = inverse_frequencies(16, 1e4, "llama3", options)
    assert magnitude == 1.0
    assert found[0] == plain[0]
    assert found[-1] == plain[-1] / 8
    turns = 128 * plain[1] / (2 * math.pi)
    assert 1 < 128 * plain[2] / (2 * math.pi) < 4 < turns
    share = (128 * plain[2] / (2 * math.pi) - 1) / 3
    assert found[2] == pytest.approx(share * plain[2] + (1 - share) * plain[2] / 8)
