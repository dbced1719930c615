"""Laws of the packagings of others: the same head drafts the same whatever it came in, and equals numpy's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.catalog.formats import DrafterConfig, read_drafter
from mlx_dspark.contracts import Ask, Observation, TargetSpec
from mlx_dspark.drafters.block import BlockDrafter, Trace
from mlx_dspark.drafters.dspark.drafter import DSparkDrafter
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.errors import BadCheckpoint, DsparkError, UnsupportedModel
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.kernels.dispatch import CHOICES
from mlx_dspark.nn.context import ContextRows
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.rope import Rope, inverse_frequencies
from mlx_dspark.targets.load import target_of
from tests import numpy_drafter as by_hand
from tests.fakes import stock_greedy
from tests.golden import TableTarget
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_families import family_config, tiny_family
from tests.tiny_packagings import YARN, as_nemotron, as_specforge, as_speculators, config_of, save, weights_of

HIDDEN, VOCAB, LAYERS, TAPS = 64, 384, 2, 2
FULL, SLIDING = "full_attention", "sliding_attention"
EMBED = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(201))
HEAD = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(202)) / 8
ALL_SLIDE: dict[str, Any] = {"layer_types": [SLIDING] * LAYERS, "sliding_window": 9}
NO_TABLES: dict[str, Any] = {"own_embedding": False, "own_head": False}


class Case(NamedTuple):
    """`native` writes a head in a layout that is read elsewhere, `wrap` writes that as the packaging does."""

    native: Callable[..., Path]
    options: dict[str, Any]
    wrap: Callable[..., Path]
    wrapping: dict[str, Any]
    facts: Callable[..., by_hand.Facts]
    packaging: str


def speculators(options: dict[str, Any], **wrapping: Any) -> Case:
    return Case(save_tiny_dspark, options, as_speculators, wrapping, by_hand.speculators_facts, "speculators")


def specforge(options: dict[str, Any], **wrapping: Any) -> Case:
    return Case(save_tiny_dspark, options, as_specforge, wrapping, by_hand.specforge_facts, "SpecForge")


def nemotron(**wrapping: Any) -> Case:
    options = ALL_SLIDE | {"logits_start": 1, "own_head": False, "confidence": False, "block_size": 8}
    return Case(save_tiny_dspark, options, as_nemotron, wrapping, by_hand.nemotron_facts, "Nemotron")


def speculators_dflash(options: dict[str, Any]) -> Case:
    wrapping = {"algorithm": "dflash"}
    return Case(save_tiny_dflash, options, as_speculators, wrapping, by_hand.speculators_facts, "speculators")


CASES = {
    "speculators": speculators({}),
    "speculators reduced": speculators({"draft_vocab": 96, "logits_start": 1}),
    "speculators gated windows": speculators({"layer_types": [SLIDING, FULL], "sliding_window": 5}),
    "muse": speculators(ALL_SLIDE | NO_TABLES | {"draft_vocab": VOCAB, "block_size": 15}),
    "speculators dflash": speculators_dflash({"sliding": (1,)}),
    "specforge": specforge(NO_TABLES | {"confidence_with_markov": False}),
    "specforge sliding": specforge(NO_TABLES | {"layer_types": [FULL, SLIDING], "sliding_window": 9}),
    "specforge old": specforge(NO_TABLES, old_names=True),
    "nemotron": nemotron(),
    "nemotron quiet sinks": nemotron(sinks=-1e4),
}
"""Heads that another layout can hold as well."""

ONLY = {
    "specforge yarn": specforge(NO_TABLES | {"rope_parameters": YARN}),
    "nemotron sinks": nemotron(sinks=-1.0),
}
"""Heads that only their packaging holds."""

EVERY = CASES | ONLY
CAUSAL = ("muse", "nemotron", "nemotron quiet sinks", "nemotron sinks")
every_case = pytest.mark.parametrize("name", EVERY)


def native(name: str, folder: Path, seed: int = 0) -> Path:
    case = EVERY[name]
    common = {"hidden": HIDDEN, "vocab": VOCAB, "target_layers": LAYERS, "seed": seed}
    return case.native(folder / f"native {seed}", **common, **case.options)


def wrapped(name: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    case = EVERY[name]
    return case.wrap(native(name, folder, seed), folder / f"wrapped {seed}", **case.wrapping, **overrides)


def loaded(folder: Path, quantize_bits: int = 0) -> BlockDrafter:
    drafter = load_drafter(folder, quantize_bits=quantize_bits)
    drafter.bind(TableTarget(TargetSpec("table", VOCAB, HIDDEN, LAYERS, context=1 << 20), EMBED, HEAD))
    return drafter


def features(n: int, seed: int = 0) -> mx.array:
    return mx.random.normal((n, TAPS * HIDDEN), key=mx.random.key(3000 + seed))


def observe(drafter: BlockDrafter, rows: ContextRows, seen: mx.array) -> None:
    drafter.observe(rows, Observation([[0] * seen.shape[0]], seen[None], [0], [0]))


def traces(drafter: BlockDrafter, context: mx.array) -> list[Trace]:
    """Two rounds: after 21 positions, and after all of `context`."""
    rows, found = drafter.new_rows(), []
    for begin, end, anchor in ((0, 21, 7), (21, context.shape[0], 9)):
        observe(drafter, rows, context[begin:end])
        found.append(drafter.trace(rows, [anchor]))
    return found


def same(left: mx.array | None, right: mx.array | None) -> bool:
    if left is None or right is None:
        return left is right
    return bool(mx.array_equal(left, right))


def close(found: mx.array | None, expected: Any, tolerance: float = 1e-4) -> bool:
    wanted = np.asarray(expected)
    return (
        found is not None
        and float(np.abs(np.array(found) - wanted).max()) <= tolerance * np.abs(wanted).max()
    )


def plain(weights: dict[str, mx.array]) -> dict[str, Any]:
    return {name.removeprefix("logit_head."): np.array(weight) for name, weight in weights.items()}


def numbers(config: DrafterConfig) -> dict[str, Any]:
    return {"taps": config.taps, "first": config.first_slot, "windows": config.layer_windows}


# ------------------------------------------------------------------------- the same head, the same drafts


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_the_packaging_does_not_show(name: str, seed: int, tmp_path: Path) -> None:
    folder, context = wrapped(name, tmp_path, seed), features(30, seed)
    drafter = loaded(folder)
    assert read_drafter(folder).packaging == CASES[name].packaging
    for mine, own in zip(
        traces(drafter, context), traces(loaded(native(name, tmp_path, seed)), context), strict=True
    ):
        assert mine.chain.tokens.tolist() == own.chain.tokens.tolist()
        assert same(mine.hidden, own.hidden)
        assert same(mine.chain.base_logits, own.chain.base_logits)
        assert same(mine.chain.logits, own.chain.logits)
        assert same(mine.chain.confidence_logits, own.chain.confidence_logits)


@pytest.mark.parametrize("seed", [0, 1])
@every_case
def test_equals_numpy(name: str, seed: int, tmp_path: Path) -> None:
    folder, context = wrapped(name, tmp_path, seed), features(30, seed)
    weights = plain(weights_of(folder))
    facts = EVERY[name].facts(config_of(folder), weights)
    drafter = loaded(folder)
    assert numbers(drafter.config) == {
        "taps": facts.taps,
        "first": facts.first,
        "windows": tuple(facts.windows),
    }
    for trace, (seen, anchor) in zip(traces(drafter, context), ((21, 7), (30, 9)), strict=True):
        expected = by_hand.draft(
            facts, weights, np.array(context[:seen]), anchor, np.array(EMBED), np.array(HEAD)
        )
        assert close(trace.hidden[0], expected.hidden)
        assert close(trace.chain.base_logits[0], expected.base)
        assert close(trace.chain.logits[0], expected.logits)
        assert trace.chain.tokens[0].tolist() == expected.tokens
        assert (trace.chain.confidence_logits is None) == (not expected.confidence)
        if trace.chain.confidence_logits is not None:
            assert close(trace.chain.confidence_logits[0], expected.confidence)


@pytest.mark.parametrize("held_as", CHOICES)
@pytest.mark.parametrize("name", ["muse", "nemotron sinks", "specforge yarn"])
def test_the_way_weights_are_held_does_not_show(name: str, held_as: str, tmp_path: Path) -> None:
    folder, context = wrapped(name, tmp_path), features(30)
    drafter = loaded(folder)
    drafter.hold_weights(held_as, tmp_path)
    for mine, own in zip(traces(drafter, context), traces(loaded(folder), context), strict=True):
        assert close(mine.hidden, np.array(own.hidden))
        assert mine.chain.tokens.tolist() == own.chain.tokens.tolist()


def test_sinks_take_weight(tmp_path: Path) -> None:
    heard, quiet = (
        loaded(as_nemotron(native("nemotron", tmp_path), tmp_path / str(sinks), sinks=sinks))
        for sinks in (2.0, -1e4)
    )
    pairs = zip(traces(heard, features(30)), traces(quiet, features(30)), strict=True)
    assert not any(close(a.hidden, np.array(b.hidden), 1e-2) for a, b in pairs)


# ---------------------------------------------------------------------------------------------- the slots


@pytest.mark.parametrize(
    ("keys", "first_slot"),
    [
        ({}, 0),
        ({"drafts": 6}, 1),
        ({"drafts": 7, "sample_from_anchor": False}, 0),
        ({"drafts": 6, "sample_from_anchor": True}, 1),
        ({"drafts": 3, "sample_from_anchor": True}, 0),
        ({"drafts": 9, "sample_from_anchor": False}, 1),
        ({"drafts": None, "sample_from_anchor": True}, 0),
        ({"drafts": None, "sample_from_anchor": False}, 1),
        ({"drafts": 7, "logits_start": 1}, 1),
    ],
)
def test_first_slot_of_speculators(keys: dict[str, Any], first_slot: int, tmp_path: Path) -> None:
    config = read_drafter(with_drafts(tmp_path, **keys)).config
    assert (config.first_slot, config.max_draft) == (first_slot, 7 - first_slot)


def with_drafts(folder: Path, drafts: int | None = 7, **overrides: Any) -> Path:
    methods = [] if drafts is None else [{"proposal_type": "greedy", "speculative_tokens": drafts}]
    section = {"algorithm": "dspark", "proposal_methods": methods}
    return wrapped("speculators", folder, speculators_config=section, **overrides)


def test_a_silent_speculators_head_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="speculative_tokens"):
        assert read_drafter(with_drafts(tmp_path, drafts=None)).config.first_slot == 1


@pytest.mark.parametrize(("said", "first_slot"), [(None, 1), (False, 1), (True, 0)])
def test_first_slot_of_speculators_dflash(said: bool | None, first_slot: int, tmp_path: Path) -> None:
    config = read_drafter(wrapped("speculators dflash", tmp_path, sample_from_anchor=said)).config
    assert (config.family, config.first_slot) == ("dflash", first_slot)


def test_a_reduced_dflash_head_owns_its_tables(tmp_path: Path) -> None:
    """The same as a DSpark head without Markov and confidence heads, whose anchor slot is silent."""
    plain_head = {"markov": "none", "confidence": False, "logits_start": 1, "draft_vocab": 96}
    head = save_tiny_dspark(tmp_path / "native", **plain_head)
    mine = loaded(as_speculators(head, tmp_path / "dflash", algorithm="dflash"))
    assert mine.config.family == "dflash"
    for found, own in zip(traces(mine, features(30)), traces(loaded(head), features(30)), strict=True):
        assert same(found.hidden, own.hidden)
        assert same(found.chain.logits, own.chain.logits)
        assert found.chain.tokens.tolist() == own.chain.tokens.tolist()


def test_first_slot_of_nemotron(tmp_path: Path) -> None:
    silent = {"dspark_bonus_anchor": True, "sample_from_anchor": None}
    assert read_drafter(wrapped("nemotron", tmp_path, **silent)).config.first_slot == 1
    drafts = {"dspark_bonus_anchor": None, "sample_from_anchor": True}
    assert read_drafter(wrapped("nemotron", tmp_path, **drafts)).config.first_slot == 0
    torn = {"dspark_bonus_anchor": True, "sample_from_anchor": True}
    assert "sample_from_anchor" in refusal(BadCheckpoint, wrapped("nemotron", tmp_path, **torn))


# ----------------------------------------------------------------------------------------------- the taps


def test_speculators_count_taps_from_one(tmp_path: Path) -> None:
    options = {"taps": (1, 13, 25, 37, 49), "target_layers": 52, "num_target_layers": None}
    head = save_tiny_dspark(tmp_path / "native", **options)
    folder = as_speculators(head, tmp_path / "wrapped")
    assert config_of(folder)["aux_hidden_state_layer_ids"] == [2, 14, 26, 38, 50]
    assert read_drafter(folder).config.taps == (1, 13, 25, 37, 49)
    unshifted = save(folder, config_of(folder) | {"tap_origin": 0}, weights_of(folder))
    assert read_drafter(unshifted).config.taps == (2, 14, 26, 38, 50)


def test_the_first_tap_of_speculators_may_be_the_embedding(tmp_path: Path) -> None:
    folder = wrapped("speculators", tmp_path, aux_hidden_state_layer_ids=[0, 2])
    assert read_drafter(folder).config.taps == (-1, 1)


def test_taps_of_nemotron(tmp_path: Path) -> None:
    assert read_drafter(wrapped("nemotron", tmp_path)).config.taps == (0, 1)
    aux_alone = {"target_layer_ids": None, "eagle_aux_hidden_state_layer_ids": [0, 2]}
    assert read_drafter(wrapped("nemotron", tmp_path, **aux_alone)).config.taps == (-1, 1)


def test_specforge_spreads_taps_that_are_not_listed(tmp_path: Path) -> None:
    head = save_tiny_dspark(tmp_path / "n", layers=2, taps=(1, 5), target_layers=8)
    folder = as_specforge(head, tmp_path / "w")
    section = config_of(folder)["dflash_config"]
    del section["target_layer_ids"]
    assert read_drafter(save(folder, config_of(folder), weights_of(folder))).config.taps == (1, 5)


# ----------------------------------------------------------------------------------------------- the rope


def test_yarn_numbers() -> None:
    published = {
        "factor": 32.0,
        "original_max_position_embeddings": 8192.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    expected = {
        0: 1.0,
        16: 0.01548585,
        24: 8.3986e-4,
        28: 8.29882e-5,
        31: 1.271233e-5,
        63: 4.01999e-9,
    }
    for inverse, factor in (
        inverse_frequencies(128, 1e7, "yarn", published),
        by_hand.frequencies(128, 1e7, published),
    ):
        assert factor == pytest.approx(1.3465736, rel=1e-6)
        assert {pair: float(inverse[pair]) for pair in expected} == pytest.approx(expected, rel=1e-5)
    unscaled, _ = inverse_frequencies(128, 1e7, "default", {})
    assert [unscaled[16], unscaled[63]] == pytest.approx([0.01778279, 1.286397e-7], rel=1e-6)


@pytest.mark.parametrize("position", [0, 1, 40])
def test_yarn_scales_vectors_at_every_position(position: int) -> None:
    x = mx.random.normal((1, 1, 3, 16), key=mx.random.key(4))
    turned = Rope(16, 1e4, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64.0})(x, position)
    ratio = mx.linalg.norm(turned, axis=-1) / mx.linalg.norm(x, axis=-1)
    assert close(ratio, np.full((1, 1, 3), 0.1 * math.log(4) + 1), 1e-5)


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "yarn"), (None, "default")],
)
def test_only_specforge_reads_a_scaling(scaling: Any, kind: str, tmp_path: Path) -> None:
    """In the other DSpark packagings it is noise from the target's config."""
    keys = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": scaling}
    config = read_drafter(wrapped("specforge", tmp_path / "forge", **keys)).config
    assert (config.rope_kind, config.rope_theta) == (kind, 1e4)
    assert read_drafter(wrapped("nemotron", tmp_path / "nvidia", **keys)).config.rope_kind == "default"
    inner = config_of(wrapped("speculators", tmp_path / "vllm"))["transformer_layer_config"] | keys
    folder = wrapped("speculators", tmp_path / "vllm", transformer_layer_config=inner)
    assert read_drafter(folder).config.rope_kind == "default"


# --------------------------------------------------------------------------------- a block that is cut short


@every_case
def test_a_causal_block_is_cut_short_bit_for_bit(name: str, tmp_path: Path) -> None:
    """A capped round runs the slots it reads and no more; under a bidirectional mask it runs them all."""
    drafter = loaded(wrapped(name, tmp_path))
    causal, size = name in CAUSAL, drafter.config.block_size
    first, run = drafter.config.first_slot, []
    rows = drafter.new_rows()
    observe(drafter, rows, features(30))
    whole = drafter.trace(rows, [7])
    model, block = (
        drafter.model,
        drafter.embed_ids(mx.array([[7] + [drafter.config.mask_token] * (size - 1)])),
    )
    for cap in range(1, drafter.max_draft + 1):
        slots = min(size, first + cap)
        assert same(model(block[:, :slots], rows.rows), whole.hidden[:, :slots]) == (causal or slots == size)
        proposal = drafter.propose(rows, ask(rows, cap))
        assert proposal.tokens[0].tolist() == whole.chain.tokens[0, :cap].tolist()
        run.append(drafter._block(rows.rows, [7], cap).shape[1])
    assert run == [min(size, first + cap) if causal else size for cap in range(1, drafter.max_draft + 1)]


def ask(rows: ContextRows, cap: int, sampling: SamplingParams | None = None, seed: int | None = None) -> Ask:
    return Ask([7], [cap], rows.depth, [sampling or SamplingParams()], RowNoise.of_seeds([seed]))


@pytest.mark.parametrize("name", ["muse", "speculators dflash"])
def test_windows_may_look_ahead(name: str, tmp_path: Path) -> None:
    config = read_drafter(wrapped(name, tmp_path, sliding_window_non_causal=True)).config
    assert config.layer_causal == (False, False)
    assert config.layer_windows == read_drafter(wrapped(name, tmp_path)).config.layer_windows


def test_a_head_for_muse_borrows_the_rows_and_the_head_as_they_are_stored(tmp_path: Path) -> None:
    """Neither the norm after the embedding, nor the multiplier or the cap after the head."""
    model: Any = tiny_family("muse_glimmer", seed=1)
    target, ids = target_of(model, family_config("muse_glimmer"), context=512), mx.array([5, 9, 200])
    vocab, hidden, layers = target.spec.vocab, target.spec.hidden, target.spec.layers
    head = save_tiny_dspark(
        tmp_path / "native", hidden=hidden, vocab=vocab, target_layers=layers, **ALL_SLIDE, **NO_TABLES
    )
    drafter = load_drafter(as_speculators(head, tmp_path / "wrapped"), quantize_bits=0)
    drafter.bind(target)
    assert isinstance(drafter, DSparkDrafter)
    rows = model.model.embed_tokens(ids)
    assert same(drafter.embed_ids(ids), rows)
    assert not close(mx.fast.rms_norm(rows, None, 1e-6), np.array(rows), 0.1)
    stored = model.model.embed_tokens.as_linear if model.tie_word_embeddings else model.lm_head
    assert same(drafter.base_logits(rows[None]), stored(rows[None]))
    prompt, truth = [30, 31, 32] * 4, []
    for _, event in Engine(target, drafter).run([GenerateRequest(tuple(prompt), 12)]):
        if isinstance(event, Committed):
            truth += event.tokens
    assert truth == stock_greedy(model, prompt, 12)


# --------------------------------------------------------------------------------------- reduced vocabulary


def test_q_of_a_reduced_vocabulary_is_scattered(tmp_path: Path) -> None:
    """It is the softmax of the drafted chain's logits at the ids they stand for, and zero elsewhere."""
    folder, context, warm = wrapped("speculators reduced", tmp_path), features(21), 0.8
    weights = plain(weights_of(folder))
    facts = by_hand.speculators_facts(config_of(folder), weights)
    assert facts.ids is not None
    ids = facts.ids.tolist()
    drafter = loaded(folder)
    for seed in range(4):
        rows = drafter.new_rows()
        observe(drafter, rows, context)
        proposal = drafter.propose(rows, ask(rows, 9, SamplingParams(temperature=warm), seed))
        tokens = np.array(proposal.tokens[0]).tolist()
        assert set(tokens) <= set(ids)
        chain = by_hand.draft(
            facts,
            weights,
            np.array(context),
            7,
            np.array(EMBED),
            np.array(HEAD),
            lambda slot, _, drafted=tokens: ids.index(drafted[slot]),
        )
        assert chain.tokens == tokens
        for slot in range(drafter.max_draft):
            q = np.array(proposal.q.at(mx.array([slot]))[0])
            shares = np.exp(chain.logits[slot].astype(np.float64) / warm)
            assert np.abs(q[ids] - shares / shares.sum()).max() < 1e-5
            assert not np.delete(q, ids).any()


@pytest.mark.parametrize(
    ("keys", "vocab"), [({}, 96), ({"draft_vocab_size": None}, 96), ({"draft_vocab_size": VOCAB}, None)]
)
def test_the_size_of_a_draft_vocabulary(keys: dict[str, Any], vocab: int | None, tmp_path: Path) -> None:
    folder = wrapped("speculators reduced", tmp_path, **keys)
    if vocab is None:
        assert "draft_vocab_size" in refusal(BadCheckpoint, folder)
    else:
        assert read_drafter(folder).config.draft_vocab == vocab


# ------------------------------------------------------------------------------------------ what is refused


def refusal(kind: type[DsparkError], folder: Path) -> str:
    with pytest.raises(kind) as caught:
        read_drafter(folder)
    assert caught.value.next_step
    return caught.value.sentence


STRICT = ("speculators reduced", "speculators dflash", "specforge old", "nemotron sinks")


@pytest.mark.parametrize("name", STRICT)
def test_a_wrong_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = wrapped(name, tmp_path)
    config, weights = config_of(folder), weights_of(folder)
    for stored, weight in weights.items():
        read_as = stored.removeprefix("logit_head.")
        if read_as in ("embed_tokens.weight", "t2d"):
            continue
        rest = {other: value for other, value in weights.items() if other != stored}
        assert read_as in refusal(BadCheckpoint, save(folder, config, rest))
        grown = mx.zeros((weight.shape[0] + 1, *weight.shape[1:]), dtype=weight.dtype)
        assert read_as in refusal(BadCheckpoint, save(folder, config, weights | {stored: grown}))
        if mx.issubdtype(weight.dtype, mx.floating):
            spoilt = weights | {stored: weight * mx.array(math.nan)}
            assert stored in refusal(BadCheckpoint, save(folder, config, spoilt))
    extra = weights | {"layers.0.odd": mx.zeros(3)}
    assert "unexpected layers.0.odd" in refusal(BadCheckpoint, save(folder, config, extra))
    assert read_drafter(save(folder, config, weights)).packaging == EVERY[name].packaging


@pytest.mark.parametrize(
    ("name", "keys", "kind", "named"),
    [
        ("speculators", {"speculators_model_type": "eagle3"}, UnsupportedModel, "'eagle3'"),
        ("speculators", {"speculators_model_type": "dflash"}, BadCheckpoint, "speculators_model_type"),
        ("speculators", {"transformer_layer_config": None}, BadCheckpoint, "transformer_layer_config"),
        ("speculators", {"transformer_layer_config": {}}, BadCheckpoint, "hidden_size, vocab_size"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, BadCheckpoint, "aux_hidden_state_layer_ids"),
        ("speculators", {"aux_hidden_state_layer_ids": [2, 1]}, BadCheckpoint, "aux_hidden_state_layer_ids"),
        ("speculators", {"aux_hidden_state_layer_ids": [-1, 1]}, BadCheckpoint, "aux_hidden_state_layer_ids"),
        ("speculators", {"mask_token_id": None}, BadCheckpoint, "mask_token_id"),
        ("speculators", {"mask_token_id": VOCAB}, BadCheckpoint, "mask_token_id"),
        ("speculators", {"target_hidden_size": 65}, BadCheckpoint, "target_hidden_size"),
        ("speculators", {"markov_rank": 0, "enable_confidence_head": False}, BadCheckpoint, "markov_head."),
        ("speculators", {"markov_head_type": "attention"}, UnsupportedModel, "'attention'"),
        ("speculators dflash", {"enable_confidence_head": True}, None, ""),
        ("specforge", {"dflash_config": {"projector_type": "domino"}}, UnsupportedModel, "'domino'"),
        ("specforge", {"dflash_config": {"projector_type": "dspark"}}, BadCheckpoint, "mask_token_id"),
        ("specforge", {"hidden_act": "gelu"}, UnsupportedModel, "hidden_act"),
        ("specforge", {"speculators_model_type": "dspark"}, UnsupportedModel, "speculators and SpecForge"),
        ("nemotron", {"dspark_fixup_head_type": "gru"}, UnsupportedModel, "dspark_fixup_head_type"),
        ("nemotron", {"dflash_query_causal": False}, BadCheckpoint, "dflash_query_causal"),
        ("nemotron", {"attention_sink_bias": True}, BadCheckpoint, "attention_sink_bias"),
        ("nemotron sinks", {"attention_sink_bias": False}, BadCheckpoint, "attention_sink_bias"),
        ("nemotron", {"rope_is_neox_style": False}, UnsupportedModel, "rope_is_neox_style"),
    ],
)
def test_a_wrong_key_is_named(
    name: str, keys: dict[str, Any], kind: type[DsparkError] | None, named: str, tmp_path: Path
) -> None:
    folder = wrapped(name, tmp_path, **keys)
    if kind is None:
        assert read_drafter(folder).config.confidence is False
    else:
        assert named in refusal(kind, folder)


@pytest.mark.parametrize("mode", ["mha", "mla"])
def test_an_attention_mode_that_does_not_fit_is_named(mode: str, tmp_path: Path) -> None:
    folder = wrapped("specforge", tmp_path)
    config = config_of(folder)
    config["dflash_config"]["attention_mode"] = mode
    assert "attention_mode" in refusal(DsparkError, save(folder, config, weights_of(folder)))


def test_domino_tensors_and_twins_are_named(tmp_path: Path) -> None:
    folder = wrapped("specforge old", tmp_path)
    config, weights = config_of(folder), weights_of(folder)
    gru = weights | {"logit_head.prefix_gru.weight_ih_l0": mx.zeros(3)}
    assert "Domino" in refusal(UnsupportedModel, save(folder, config, gru))
    name = "markov_head.markov_w1.weight"
    twins = weights | {name: weights[f"logit_head.{name}"]}
    assert f"both {name} and logit_head.{name}" in refusal(BadCheckpoint, save(folder, config, twins))


def test_the_target_s_own_tensors_are_left_out(tmp_path: Path) -> None:
    folder = wrapped("speculators", tmp_path)
    weights = weights_of(folder)
    more = {"verifier_lm_head.weight": mx.zeros((VOCAB, HIDDEN)), "verifier_norm.weight": mx.zeros(HIDDEN)}
    assert read_drafter(save(folder, config_of(folder), weights | more)).weights.keys() == weights.keys()


def test_what_a_nested_backbone_leaves_out(tmp_path: Path) -> None:
    """Widths follow the tensors; a window or rope base that is left out is Qwen3's own."""
    folder = wrapped("muse", tmp_path)
    config = config_of(folder)
    inner = config["transformer_layer_config"]
    whole = read_drafter(folder).config
    for key in ("head_dim", "num_key_value_heads", "rms_norm_eps", "attention_bias", "model_type"):
        del inner[key]
    assert read_drafter(save(folder, config, weights_of(folder))).config == whole
    del inner["sliding_window"]
    del inner["rope_parameters"]
    silent = read_drafter(save(folder, config, weights_of(folder))).config
    assert (silent.layer_windows, silent.rope_theta) == ((4096, 4096), 1e4)
    inner["use_sliding_window"] = False
    full = read_drafter(save(folder, config, weights_of(folder))).config
    assert (full.layer_windows, full.layer_causal) == ((None, None), (False, False))


def test_layers_with_ropes_of_their_own(tmp_path: Path) -> None:
    config = config_of(wrapped("muse", tmp_path))
    ropes = {
        kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ((FULL, 5.0), (SLIDING, 7e4))
    }
    inner = config["transformer_layer_config"] | {"rope_parameters": ropes}
    assert read_drafter(wrapped("muse", tmp_path, transformer_layer_config=inner)).config.rope_theta == 7e4


def test_a_window_of_nemotron(tmp_path: Path) -> None:
    named = {"sliding_window": 5, "layer_types": None}
    assert read_drafter(wrapped("nemotron", tmp_path, **named)).config.layer_windows == (5, 5)
    folder = wrapped("nemotron", tmp_path, layer_types=None)
    assert read_drafter(folder).config.layer_windows == (9, 9)
    path = folder / "config.json"
    path.write_text(json.dumps(config_of(folder) | {"dflash_config": {"use_swa": True}}))
    assert "swa_window_size" in refusal(BadCheckpoint, folder)
