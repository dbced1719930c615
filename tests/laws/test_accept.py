"""Laws of the accept rule: whatever is proposed, the text is the plain sampler's.

The target is a table: the logits after a token depend on that token alone. Many rows run at once, each in
rounds of its own until it has enough tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.engine import accept as rule
from mlx_dspark.engine import sampling as shaping
from mlx_dspark.engine.accept import Acceptance, accept, residual
from mlx_dspark.engine.sampling import RowHistory
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn import noise as noises
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.probs import ByRow, Candidates, Dense, DraftProbs, MappedVocab, PointMass
from tests.reference_sampler import fit_p_value, reference_logits, reference_text

VOCAB, DRAFTS, LENGTH = 8, 2, 3
DRAWS = 50_000
P_FLOOR = 1e-4
PROMPT = (3, 5, 5)

GREEDY = SamplingParams()
UNIT = SamplingParams(temperature=1.0)
SETTINGS = {
    "T 1": UNIT,
    "T 0.6": replace(UNIT, temperature=0.6),
    "top-k": replace(UNIT, top_k=4),
    "top-p": replace(UNIT, top_p=0.7),
    "min-p": replace(UNIT, min_p=0.15),
    "repetition": replace(UNIT, repetition_penalty=1.6),
    "presence": replace(UNIT, presence_penalty=1.2),
    "frequency": replace(UNIT, frequency_penalty=0.9),
    "bias": replace(UNIT, logit_bias={0: 1.5, 2: -1000.0, 5: -0.7}),
    "all": SamplingParams(
        temperature=0.8,
        top_k=6,
        top_p=0.9,
        min_p=0.03,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={0: 1.0, 6: -0.5},
    ),
}

TABLE = np.random.default_rng(1).normal(scale=1.2, size=(VOCAB, VOCAB)).astype(np.float32)
NEAR = TABLE + np.random.default_rng(2).normal(scale=0.4, size=TABLE.shape).astype(np.float32)
FAR = np.random.default_rng(3).normal(scale=1.5, size=TABLE.shape).astype(np.float32)
D2T = mx.array([0, 0, 1, 1, 3])
MAPPED_IDS = mx.arange(5) + D2T

Drafted = tuple[mx.array, DraftProbs]
TableDrafter = Callable[[mx.array, mx.array, RowNoise], Drafted]


# Drafters: from anchors [rows], positions [rows] of the first draft and noise to tokens [rows, DRAFTS] and q


def drawing(table: np.ndarray) -> TableDrafter:
    """Draws from softmax(table[previous token])."""

    def propose(anchors: mx.array, positions: mx.array, noise: RowNoise) -> Drafted:
        tokens, probs, logits = [], [], mx.array(table)
        for slot in range(DRAFTS):
            scores = logits[tokens[-1] if tokens else anchors]
            gumbel = noise.draft_gumbel(positions[:, None] + slot, VOCAB)[:, 0]
            tokens.append(mx.argmax(scores + gumbel, axis=-1))
            probs.append(mx.softmax(scores, axis=-1))
        return mx.stack(tokens, axis=1), Dense(mx.stack(probs, axis=1))

    return propose


def selecting(anchors: mx.array, positions: mx.array, noise: RowNoise) -> Drafted:
    """As DFlash 2 does: a row over a few candidates, zeros elsewhere."""
    few = np.argsort(FAR, axis=-1)[:, :4]
    table = np.full_like(NEAR, -np.inf)
    np.put_along_axis(table, few, np.take_along_axis(NEAR, few, axis=-1), axis=-1)
    tokens, q = drawing(table)(anchors, positions, noise)
    assert isinstance(q, Dense)
    before = mx.concatenate([anchors[:, None], tokens[:, :-1]], axis=1)
    ids = mx.array(few)[before]
    return tokens, Candidates(mx.take_along_axis(q.probs, ids, axis=-1), ids, VOCAB)


def mapped(anchors: mx.array, positions: mx.array, noise: RowNoise) -> Drafted:
    """Drafts over a reduced vocabulary, with the noise of the target tokens it maps to."""
    tokens, probs, logits = [], [], mx.take(mx.array(NEAR), MAPPED_IDS, axis=1)
    for slot in range(DRAFTS):
        scores = logits[tokens[-1] if tokens else anchors]
        gumbel = noise.draft_gumbel(positions[:, None] + slot, VOCAB)[:, 0]
        tokens.append(mx.take(MAPPED_IDS, mx.argmax(scores + mx.take(gumbel, MAPPED_IDS, axis=1), axis=-1)))
        probs.append(mx.softmax(scores, axis=-1))
    return mx.stack(tokens, axis=1), MappedVocab(mx.stack(probs, axis=1), D2T, VOCAB)


def certain(anchors: mx.array, positions: mx.array, noise: RowNoise) -> Drafted:
    """Drafts the arg-max, or looks it up: no draw."""
    best = mx.argmax(mx.array(NEAR), axis=-1)
    first = best[anchors]
    tokens = mx.stack([first, best[first]], axis=1)
    return tokens, PointMass(tokens, VOCAB)


def composed(anchors: mx.array, positions: mx.array, noise: RowNoise) -> Drafted:
    """Another drafter in every row; some rows of the dense one draft its arg-max."""
    rows = range(anchors.shape[0])
    drafters = [drawing(FAR), mapped, certain, drawing(NEAR)]
    drafted = [propose(anchors, positions, noise) for propose in drafters]
    tokens = mx.stack([tokens for tokens, _ in drafted])[
        mx.array([r % 4 for r in rows]), mx.arange(len(rows))
    ]
    dense = drafted[3][1]
    assert isinstance(dense, Dense)
    greedy = tuple(row % 8 == 7 for row in rows)
    tokens = mx.where(mx.array(greedy)[:, None], drafted[2][0], tokens)
    parts = [*(q for _, q in drafted[:3]), Dense(dense.probs, greedy)]
    return tokens, ByRow([(parts[row % 4], row) for row in rows])


DRAFTERS: dict[str, TableDrafter] = {
    "good": drawing(NEAR),
    "bad": drawing(FAR),
    "selector": selecting,
    "mapped": mapped,
    "point": certain,
    "composed": composed,
}


OTHERS = [name for name in DRAFTERS if name not in ("good", "bad")]


# Running texts


@cache
def history(text: tuple[int, ...]) -> RowHistory:
    return RowHistory.start(PROMPT, VOCAB).extended(mx.array(text, dtype=mx.int32))


def listed(values: mx.array) -> list:
    return np.array(values).tolist()


def one_round(
    texts: Sequence[tuple[int, ...]],
    sampling: Sequence[SamplingParams],
    noise: RowNoise,
    drafter: TableDrafter | None,
    lengths: tuple[int, ...],
) -> list[tuple[int, ...]]:
    """Every text, longer by the tokens one round commits."""
    anchors = mx.array([text[-1] if text else PROMPT[-1] for text in texts])
    positions = mx.array([len(PROMPT) + len(text) for text in texts])
    tokens, q = (
        drafter(anchors, positions, noise) if drafter else (mx.zeros((len(texts), 0), dtype=mx.int32), None)
    )
    logits = mx.array(TABLE)[mx.concatenate([anchors[:, None], tokens], axis=1)]
    histories = [history(text) if s.penalised else None for text, s in zip(texts, sampling, strict=True)]
    verdict = accept(logits, tokens, lengths, q, sampling, histories, noise, positions)
    outcome = zip(texts, *map(listed, (tokens, verdict.accepted, verdict.next)), strict=True)
    return [(*text, *drafts[:count], following) for text, drafts, count, following in outcome]


def run(
    sampling: Sequence[SamplingParams],
    noise: RowNoise,
    drafter: TableDrafter | None,
    length: int = LENGTH,
    ragged: bool = True,
) -> np.ndarray:
    """The first `length` tokens of every row, `[rows, length]`. `ragged`: rows draft 0 to DRAFTS tokens."""
    texts: list[tuple[int, ...]] = [()] * len(sampling)
    unfinished = list(range(len(texts)))
    while unfinished:
        most = DRAFTS if drafter else 0
        lengths = tuple(
            min(most, (row + len(texts[row])) % (DRAFTS + 2)) if ragged else most for row in unfinished
        )
        longer = one_round(
            [texts[row] for row in unfinished],
            [sampling[row] for row in unfinished],
            noise.select(unfinished),
            drafter,
            lengths,
        )
        for row, text in zip(unfinished, longer, strict=True):
            texts[row] = text
        unfinished = [row for row in unfinished if len(texts[row]) < length]
    return np.array([text[:length] for text in texts])


def unseeded_noise(rows: int, seed: int) -> RowNoise:
    """Noise the rule must take for unseeded, though it repeats from run to run."""
    keys = np.random.default_rng(seed).integers(0, 2**32, (rows, 2), dtype=np.uint32)
    return RowNoise(mx.array(keys), (False,) * rows)


@cache
def expected_text(setting: str) -> dict[tuple[int, ...], float]:
    return reference_text(TABLE, PROMPT, LENGTH, SETTINGS[setting])


def p_value(setting: str, drafter: str | None, *, seed: int = 0) -> float:
    texts = run(
        [SETTINGS[setting]] * DRAWS, unseeded_noise(DRAWS, seed), DRAFTERS[drafter] if drafter else None
    )
    return fit_p_value(texts, expected_text(setting))


# Exact sampling


@pytest.mark.parametrize(
    ("setting", "drafter"),
    [
        *((setting, drafter) for setting in SETTINGS for drafter in ("good", "bad")),
        *((setting, drafter) for setting in ("T 1", "all") for drafter in (None, *OTHERS)),
        ("presence", "composed"),
    ],
)
def test_text_has_the_plain_samplers_distribution(setting, drafter):
    assert p_value(setting, drafter) > P_FLOOR


@pytest.mark.parametrize("setting", ["T 1", "all"])
@pytest.mark.parametrize("drafter", ["good", "bad"])
def test_seeds_together_have_the_plain_samplers_distribution(setting, drafter):
    sampling = [replace(SETTINGS[setting], seed=seed) for seed in range(DRAWS)]
    texts = run(sampling, RowNoise.of_seeds([s.seed for s in sampling]), DRAFTERS[drafter])
    assert fit_p_value(texts, expected_text(setting)) > P_FLOOR


def test_the_check_sees_a_wrong_residual(monkeypatch):
    monkeypatch.setattr(rule, "residual", lambda p, q: p)
    assert p_value("T 1", "good") < P_FLOOR


def test_the_check_sees_drafts_that_share_the_residuals_noise(monkeypatch):
    monkeypatch.setattr(noises, "_DRAFT", noises._TOKEN)
    assert p_value("T 1", "bad") < P_FLOOR


def test_the_check_sees_penalties_that_miss_the_drafts(monkeypatch):
    stale = shaping._draft_counts
    monkeypatch.setattr(shaping, "_draft_counts", lambda tokens, vocab: mx.zeros_like(stale(tokens, vocab)))
    assert p_value("presence", "good") < P_FLOOR


def test_the_check_sees_a_q_that_was_not_drawn_from(monkeypatch):
    def tempered(anchors: mx.array, positions: mx.array, noise: RowNoise) -> Drafted:
        tokens, q = drawing(NEAR)(anchors, positions, noise)
        assert isinstance(q, Dense)
        return tokens, Dense(mx.softmax(mx.log(q.probs) / 2, axis=-1))

    monkeypatch.setitem(DRAFTERS, "tempered", tempered)
    assert p_value("T 1", "tempered") < P_FLOOR


# Token for token


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_gives_the_plain_samplers_tokens(setting, drafter):
    sampling = [replace(SETTINGS[setting], seed=seed) for seed in range(200)]
    noise = RowNoise.of_seeds([s.seed for s in sampling])
    plain = run(sampling, noise, None, length=12)
    assert np.array_equal(run(sampling, noise, DRAFTERS[drafter], length=12), plain)
    some = [150, 3, 77]
    alone = run(
        [sampling[row] for row in some], noise.select(some), DRAFTERS[drafter], length=12, ragged=False
    )
    assert np.array_equal(alone, plain[some])


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_certain_drafter_gives_the_plain_samplers_tokens(setting):
    sampling, noise = [SETTINGS[setting]] * 200, unseeded_noise(200, 5)
    assert np.array_equal(run(sampling, noise, certain, length=12), run(sampling, noise, None, length=12))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_the_arg_max_whoever_drafts(drafter):
    greedy = [replace(s, temperature=0.0) for s in SETTINGS.values()]
    texts = run(greedy, RowNoise.of_seeds([None] * len(greedy)), DRAFTERS[drafter], length=12)
    for text, params in zip(texts.tolist(), greedy, strict=True):
        for slot, token in enumerate(text):
            before = text[:slot]
            logits = TABLE[before[-1] if before else PROMPT[-1]]
            assert token == np.argmax(reference_logits(logits, PROMPT, before, params))


def test_rows_of_every_sort_share_a_round():
    """Mixed rows give, row by row, what each gives alone."""
    sampling = [
        GREEDY,
        replace(UNIT, seed=1),
        UNIT,
        SETTINGS["all"],
        replace(SETTINGS["all"], seed=2),
        GREEDY,
    ] * 4
    noise = RowNoise.of_seeds([s.seed for s in sampling])
    tokens, q = composed(mx.array([3] * 24), mx.array([9] * 24), noise)
    logits = mx.array(TABLE)[mx.concatenate([mx.array([[3]] * 24), tokens], axis=1)]
    histories = [history(()) if s.penalised else None for s in sampling]
    lengths = tuple(row % (DRAFTS + 1) for row in range(24))
    positions = mx.array([9] * 24)
    together = accept(logits, tokens, lengths, q, sampling, histories, noise, positions)
    for row in range(24):
        one, only = slice(row, row + 1), [row]
        alone = accept(
            logits[one],
            tokens[one],
            lengths[one],
            q.select(only),
            sampling[one],
            histories[one],
            noise.select(only),
            positions[one],
        )
        assert alone.accepted.item() == together.accepted[row].item()
        assert alone.next.item() == together.next[row].item()


# One slot


def judge(
    p: np.ndarray, drafts: mx.array, q: DraftProbs | None, noise: RowNoise, s: SamplingParams
) -> Acceptance:
    """One draft per row against the same p in both slots."""
    rows = drafts.shape[0]
    logits = mx.broadcast_to(mx.log(mx.array(p, dtype=mx.float32)), (rows, 2, len(p)))
    at = mx.zeros((rows,), dtype=mx.int32)
    return accept(logits, drafts, (1,) * rows, q, [s] * rows, [None] * rows, noise, at)


P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.7, 0.1, 0.2])
TV = 0.5 * np.abs(P - Q).sum()
FOUR_SIGMA = 4 * 0.5 / np.sqrt(DRAWS)


def drafts_of(q: np.ndarray, noise: RowNoise) -> tuple[mx.array, Dense]:
    rows = len(noise.seeded)
    gumbel = noise.draft_gumbel(mx.zeros((rows, 1), dtype=mx.int32), len(q))
    probs = mx.broadcast_to(mx.array(q, dtype=mx.float32), (rows, 1, len(q)))
    return mx.argmax(mx.log(probs) + gumbel, axis=-1), Dense(probs)


def test_acceptance_probabilities_and_residual_of_the_formula():
    np.testing.assert_allclose(residual(mx.array(P), mx.array(Q)).tolist(), [0, 1, 0], atol=1e-6)
    _, q = drafts_of(Q, unseeded_noise(DRAWS, 1))
    for token, chance in enumerate([5 / 7, 1, 1]):
        drafts = mx.full((DRAWS, 1), token, dtype=mx.int32)
        verdict = judge(P, drafts, q, unseeded_noise(DRAWS, 2), UNIT)
        accepted = np.array(verdict.accepted)
        assert abs(accepted.mean() - chance) < (FOUR_SIGMA if chance < 1 else 1e-9)
        assert set(np.array(verdict.next)[accepted == 0].tolist()) <= {1}


@pytest.mark.parametrize("broken", ["nan", "inf"])
def test_a_q_that_is_no_number_leaves_the_plain_samplers_distribution(broken: str) -> None:
    drafts = mx.full((DRAWS, 1), 2, dtype=mx.int32)
    q = Dense(mx.full((DRAWS, 1, len(P)), float(broken)))
    verdict = judge(P, drafts, q, unseeded_noise(DRAWS, 3), UNIT)
    first = np.where(np.array(verdict.accepted) > 0, 2, np.array(verdict.next))
    assert fit_p_value(first[:, None], {(token,): float(p) for token, p in enumerate(P)}) > P_FLOOR


def test_equal_p_and_q_leave_p_as_the_residual():
    p = mx.array(P, dtype=mx.float32)
    assert mx.array_equal(residual(p, p), p)


def test_rejection_accepts_as_often_as_distributions_overlap():
    noise = unseeded_noise(DRAWS, 3)
    drafts, q = drafts_of(Q, noise)
    assert abs(np.array(judge(P, drafts, q, noise, UNIT).accepted).mean() - (1 - TV)) < FOUR_SIGMA


@pytest.mark.parametrize("seed", range(4))
def test_coupling_accepts_nearly_as_often(seed):
    p, q = np.random.default_rng(seed).dirichlet(np.ones(12), size=2)
    distance = 0.5 * np.abs(p - q).sum()
    noise = RowNoise.of_seeds(list(range(DRAWS)))
    drafts, probs = drafts_of(q, noise)
    rate = np.array(judge(p, drafts, probs, noise, UNIT).accepted).mean()
    assert rate > (1 - distance) / (1 + distance) - FOUR_SIGMA
    assert rate < 1 - distance + FOUR_SIGMA


@pytest.mark.parametrize("token", range(3))
def test_a_certain_draft_is_accepted_with_its_own_probability(token):
    drafts = mx.full((DRAWS, 1), token, dtype=mx.int32)
    for q in (PointMass(drafts, 3), None):
        accepted = np.array(judge(P, drafts, q, unseeded_noise(DRAWS, 4), UNIT).accepted)
        assert abs(accepted.mean() - P[token]) < FOUR_SIGMA


def test_drafts_past_a_rows_length_do_not_count():
    rows = 3
    drafts = mx.full((rows, 2), 1, dtype=mx.int32)
    logits = mx.broadcast_to(mx.array([0.0, 9.0, 0.0]), (rows, 3, 3))
    noise, at = RowNoise.of_seeds([None] * rows), mx.array([0] * rows)
    verdict = accept(
        logits, drafts, (0, 1, 2), PointMass(drafts, 3), [GREEDY] * rows, [None] * rows, noise, at
    )
    assert verdict.accepted.tolist() == [0, 1, 2]
    assert verdict.next.tolist() == [1, 1, 1]


# Log-probabilities


@pytest.mark.parametrize("asked", [0, 3, 100])
def test_log_probabilities_come_from_the_shaped_logits(asked):
    params = replace(SETTINGS["all"], logprobs=asked, seed=8)
    tokens, q = drawing(NEAR)(mx.array([3, 3]), mx.array([9, 9]), RowNoise.of_seeds([8, None]))
    logits = mx.array(TABLE)[mx.concatenate([mx.array([[3]] * 2), tokens], axis=1)].astype(mx.bfloat16)
    noise, at = RowNoise.of_seeds([8, None]), mx.array([9, 9])
    verdict = accept(logits, tokens, (2, 2), q, [params, GREEDY], [history(()), None], noise, at)
    assert verdict.logprobs is not None
    plain = np.array(logits.astype(mx.float32))
    for row, s in enumerate([params, GREEDY]):
        count = verdict.accepted[row].item()
        assert isinstance(count, int)
        committed = [*listed(tokens[row])[:count], verdict.next[row].item()]
        for slot, token in enumerate(committed):
            shaped = reference_logits(plain[row, slot], PROMPT, committed[:slot], s)
            expected = shaped - np.log(np.exp(shaped).sum())
            np.testing.assert_allclose(verdict.logprobs[row, slot].item(), expected[token], atol=1e-4)
            if asked == 0:
                assert verdict.top is None
                continue
            assert verdict.top is not None
            ids, values = np.array(verdict.top[0][row, slot]), np.array(verdict.top[1][row, slot])
            assert len(ids) == min(asked, VOCAB)
            np.testing.assert_allclose(values, np.sort(expected)[::-1][: len(ids)], atol=1e-4)
            np.testing.assert_allclose(values, expected[ids], atol=1e-4)


def test_nobody_asked_for_log_probabilities():
    drafts = mx.zeros((1, 1), dtype=mx.int32)
    verdict = judge(P, drafts, None, RowNoise.of_seeds([1]), UNIT)
    assert verdict.logprobs is None
    assert verdict.top is None


# Draft distributions


def test_a_reduced_vocabulary_scatters_to_the_targets_ids():
    q = MappedVocab(mx.array([[[0.2, 0.3, 0.5]]]), mx.array([2, 4, 7]), 10)
    dense = np.zeros(10)
    dense[[2, 5, 9]] = [0.2, 0.3, 0.5]
    np.testing.assert_allclose(np.array(q.at(mx.array([0])))[0], dense)
    np.testing.assert_allclose([q.of_tokens(mx.array([[token]])).item() for token in range(10)], dense)


def one_of_each() -> list[DraftProbs]:
    rows = mx.array([0, 1, 2, 3])
    noise = unseeded_noise(4, 6)
    drafters = (drawing(NEAR), mapped, certain, composed, selecting)
    proposals = [propose(rows, rows, noise)[1] for propose in drafters]
    dense, few, points = proposals[0], proposals[4], (True, False, True, False)
    assert isinstance(dense, Dense)
    assert isinstance(few, Candidates)
    return [*proposals, Dense(dense.probs, points), Candidates(few.probs, few.ids, VOCAB, points)]


@pytest.mark.parametrize("kind", range(7))
def test_draft_probabilities_agree_with_themselves(kind):
    q = one_of_each()[kind]
    for slot in range(DRAFTS):
        whole = q.at(mx.array([slot] * 4))
        np.testing.assert_allclose(np.array(whole).sum(axis=-1), 1, atol=1e-5)
        for token in range(VOCAB):
            tokens = mx.full((4, DRAFTS), token, dtype=mx.int32)
            assert mx.allclose(q.of_tokens(tokens)[:, slot], whole[:, token])
            wider = mx.full((4, DRAFTS + 3), token, dtype=mx.int32)
            assert mx.allclose(q.of_tokens(wider)[:, slot], whole[:, token])
        some = q.select([2, 0])
        assert mx.array_equal(some.at(mx.array([slot] * 2)), whole[mx.array([2, 0])])
        assert [some.point(0), some.point(1)] == [q.point(2), q.point(0)]
    assert mx.array_equal(q.at(mx.array([DRAFTS] * 4)), q.at(mx.array([DRAFTS - 1] * 4)))


def test_a_point_row_of_a_dense_proposal_is_one_hot():
    q = Dense(mx.array([[[0.4, 0.6]], [[0.4, 0.6]]]), (True, False))
    np.testing.assert_allclose(np.array(q.at(mx.array([0, 0]))), [[0, 1], [0.4, 0.6]])
    assert (q.point(0), q.point(1)) == (True, False)
