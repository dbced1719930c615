"""Laws of the noise, of the plain sampler, and of penalties inside a draft run."""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlx_dspark.engine.sampling import RowHistory, check_sampling, shape_logits
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.noise import RowNoise
from mlx_dspark.nn.sampling import distribution, draw, log_weights
from tests.reference_sampler import reference_distribution, reference_logits

GREEDY = SamplingParams()
UNIT = SamplingParams(temperature=1.0)

samplers = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.05, 0.35, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


def random_logits(seed: int, shape: tuple[int, ...], *, step: float = 0.0) -> np.ndarray:
    """Normal logits; with a `step`, rounded to its multiples, so that ties abound."""
    logits = np.random.default_rng(seed).normal(scale=3, size=shape).astype(np.float32)
    return np.round(logits / step) * np.float32(step) if step else logits


# Noise


POSITIONS = mx.array([[3, 4, 5], [3, 4, 5], [1000, 3, 77]])


@pytest.mark.parametrize("vocab", [2, 7, 16, 1001])
@pytest.mark.parametrize("kind", ["gumbel", "draft_gumbel"])
def test_noise_depends_on_key_and_position_alone(vocab, kind):
    noise = RowNoise.of_seeds([1, None, 3])
    together = getattr(noise, kind)(POSITIONS, vocab)
    for row in range(3):
        for slot in range(3):
            alone = getattr(noise.select([row]), kind)(POSITIONS[row : row + 1, slot : slot + 1], vocab)
            assert mx.array_equal(alone[0, 0], together[row, slot])


def test_uniform_depends_on_key_and_position_alone():
    noise = RowNoise.of_seeds([1, None, 3])
    together = noise.uniform(POSITIONS)
    assert together.shape == (3, 3)
    for row in range(3):
        alone = noise.select([row]).uniform(POSITIONS[row : row + 1, 1:2])
        assert mx.array_equal(alone[0, 0], together[row, 1])


def test_rows_join_and_select():
    noise = RowNoise.of_seeds([1, None]).joined(RowNoise.of_seeds([5]))
    assert noise.seeded == (True, False, True)
    assert mx.array_equal(noise.select([2]).keys, RowNoise.of_seeds([5]).keys)
    shuffled = noise.select([2, 0])
    assert shuffled.seeded == (True, True)
    assert mx.array_equal(shuffled.keys, mx.take(noise.keys, mx.array([2, 0]), axis=0))
    assert noise.select([]).keys.shape == (0, 2)


def test_seeds_repeat_and_their_absence_does_not():
    seeds = [0, 1, 2, 2**32, 2**64 - 1]
    assert mx.array_equal(RowNoise.of_seeds(seeds).keys, RowNoise.of_seeds(seeds).keys)
    keys = np.array(RowNoise.of_seeds([*seeds, None, None]).keys)
    assert len({tuple(key) for key in keys}) == len(keys)


def test_streams_do_not_correlate():
    """Neighbouring seeds, neighbouring positions and different purposes: no pair of streams is alike."""
    noise, count = RowNoise.of_seeds([1, 2, None]), 20_000
    positions = mx.array([[7, 8]] * 3)
    streams = [noise.gumbel(positions, count), noise.draft_gumbel(positions, count)[2:]]
    drawn = np.concatenate([np.array(stream).reshape(-1, count) for stream in streams])
    correlation = np.corrcoef(np.exp(-np.exp(-drawn)))
    assert np.abs(correlation - np.eye(len(drawn))).max() < 4.5 / math.sqrt(count)
    many = mx.broadcast_to(mx.arange(count), (3, count))
    by_position = np.concatenate(
        [np.array(noise.uniform(many)), np.exp(-np.exp(-np.array(noise.gumbel(many, 2)[..., 0])))]
    )
    correlation = np.corrcoef(by_position)
    assert np.abs(correlation - np.eye(6)).max() < 4.5 / math.sqrt(count)


def test_drafters_share_the_noise_of_seeded_rows_only():
    noise, positions = RowNoise.of_seeds([4, None]), mx.array([[1], [1]])
    drafts, tokens = noise.draft_gumbel(positions, 64), noise.gumbel(positions, 64)
    assert mx.array_equal(drafts[0], tokens[0])
    assert not mx.any(drafts[1] == tokens[1])


def test_noise_has_the_distribution_it_names():
    noise, count = RowNoise.of_seeds([11]), 200_000
    gumbel = np.sort(np.array(noise.gumbel(mx.array([[0]]), count))[0, 0].astype(np.float64))
    uniform = np.sort(np.array(noise.uniform(mx.arange(count)[None]))[0])
    assert np.isfinite(gumbel).all()
    assert uniform[0] >= 0
    assert uniform[-1] < 1
    steps = (np.arange(count) + 0.5) / count
    for cumulated in (np.exp(-np.exp(-gumbel)), uniform):
        assert np.abs(cumulated - steps).max() < 2.2 / math.sqrt(count)


# The plain sampler


@given(
    st.lists(samplers, min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(1, 2),
    st.sampled_from([2, 3, 8, 65, 300]),
    st.sampled_from([0.0, 1.0, 4.0]),
)
@settings(max_examples=250, deadline=None, derandomize=True)
def test_distribution_equals_the_definition(sampling, seed, width, vocab, step):
    logits = random_logits(seed, (len(sampling), width, vocab), step=step)
    ours = np.array(distribution(mx.array(logits), sampling))
    for row, params in enumerate(sampling):
        for slot in range(width):
            expected, margin = reference_distribution(logits[row, slot], params)
            assume(margin > 1e-5)
            np.testing.assert_array_equal(ours[row, slot] > 0, expected > 0)
            np.testing.assert_allclose(ours[row, slot], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 30}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.05}]
)
def test_distribution_of_a_large_vocabulary(filters):
    params = SamplingParams(temperature=0.8, **filters)
    logits = random_logits(5, (1, 1, 50_000))
    expected, _ = reference_distribution(logits[0, 0], params)
    ours = np.array(distribution(mx.array(logits), [params]))[0, 0]
    assert np.abs(ours - expected).sum() < 1e-3


def test_ties_at_a_cut_stay_together():
    logits = mx.array([[[2.0, 1.0, 1.0, 1.0, 0.0]]])
    for params in (replace(UNIT, top_k=2), replace(UNIT, top_p=0.5), replace(UNIT, min_p=math.exp(-1.01))):
        assert np.array(distribution(logits, [params]) > 0).tolist() == [[[True, True, True, True, False]]]


def test_filters_do_not_invent_ties():
    """Logits too close to differ once divided or shifted are still two logits."""
    logits = mx.array([[[100.0, 2e-7, 1e-7]]])
    assert np.array(log_weights(logits, [replace(UNIT, top_k=2)]))[0, 0, 2] == -math.inf


@given(st.lists(samplers, min_size=2, max_size=5), st.integers(0, 10**6), st.sampled_from([5, 300]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_row_ignores_its_neighbours(sampling, seed, vocab):
    logits = mx.array(random_logits(seed, (len(sampling), 2, vocab)))
    noise = RowNoise.of_seeds([seed + row for row in range(len(sampling))])
    positions = mx.array([[9, 10]] * len(sampling))
    weights, tokens = log_weights(logits, sampling), draw(logits, sampling, noise, positions)
    for row, params in enumerate(sampling):
        one = slice(row, row + 1)
        assert mx.array_equal(log_weights(logits[one], [params])[0], weights[row])
        assert mx.array_equal(
            draw(logits[one], [params], noise.select([row]), positions[one])[0], tokens[row]
        )


@given(
    st.integers(0, 10**6),
    st.sampled_from([2, 9, 300]),
    st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_greedy_path_is_the_general_path(seed, vocab, dtype):
    logits = mx.array(random_logits(seed, (2, 3, vocab), step=1.0)).astype(dtype)
    noise, positions = RowNoise.of_seeds([seed, None]), mx.array([[1, 2, 3]] * 2)
    general = mx.argmax(log_weights(logits, [GREEDY] * 2) + noise.gumbel(positions, vocab), axis=-1)
    assert mx.array_equal(draw(logits, [GREEDY] * 2, noise, positions), general)
    assert mx.array_equal(general, mx.argmax(logits, axis=-1))


def test_half_precision_logits_become_float32_first():
    logits = mx.array(random_logits(1, (1, 1, 500))).astype(mx.bfloat16)
    params = [SamplingParams(temperature=0.7, top_p=0.9)]
    probabilities = distribution(logits, params)
    assert probabilities.dtype == mx.float32
    assert mx.array_equal(probabilities, distribution(logits.astype(mx.float32), params))


def test_a_tiny_temperature_is_nearly_greedy():
    logits = mx.array(random_logits(2, (1, 1, 1000)) * 10)
    for temperature in (1e-5, 1e-4):
        p = distribution(logits, [SamplingParams(temperature=temperature, top_p=1e-30)])
        assert mx.array_equal(mx.argmax(p, axis=-1), mx.argmax(logits, axis=-1))
        assert mx.max(p).item() == 1.0


def test_excluded_tokens_are_never_drawn():
    rows = 4000
    logits = mx.broadcast_to(mx.array([-math.inf, 0.0, -math.inf, -200.0, 0.0]), (rows, 1, 5))
    noise = RowNoise.of_seeds(list(range(rows)))
    for params in (UNIT, replace(UNIT, top_k=4), replace(UNIT, top_p=0.99), replace(UNIT, min_p=0.1)):
        tokens = np.array(draw(logits, [params] * rows, noise, mx.zeros((rows, 1), dtype=mx.int32)))
        assert set(tokens.ravel().tolist()) == {1, 4}


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("share", [1, 3, 6])
def test_broken_logits_still_give_a_token_of_the_vocabulary(bad, share):
    logits = mx.array([[[bad] * share + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0][share:]]])
    noise, positions = RowNoise.of_seeds([1]), mx.array([[0]])
    for params in (GREEDY, UNIT, replace(UNIT, top_k=2), replace(UNIT, top_p=0.5), replace(UNIT, min_p=0.5)):
        assert draw(logits, [params], noise, positions).item() in range(6)


# Penalties and bias


penalties = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, 6), st.sampled_from([-1000.0, -1.0, 2.5]), max_size=3),
)


@given(
    st.lists(penalties, min_size=1, max_size=4),
    st.integers(0, 4),
    st.integers(0, 10**6),
    st.sampled_from([mx.float32, mx.bfloat16]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_each_slot_is_shaped_by_the_text_before_it(sampling, width, seed, dtype):
    vocab, rows, chance = 7, len(sampling), np.random.default_rng(seed)
    logits = mx.array(random_logits(seed, (rows, width + 1, vocab))).astype(dtype)
    drafts = chance.integers(0, vocab, (rows, width))
    prompts = [chance.integers(0, vocab, chance.integers(1, 5)).tolist() for _ in sampling]
    outputs = [chance.integers(0, vocab, chance.integers(0, 5)).tolist() for _ in sampling]
    histories = [
        RowHistory.start(prompt, vocab).extended(mx.array(output, dtype=mx.int32))
        if params.penalised
        else None
        for prompt, output, params in zip(prompts, outputs, sampling, strict=True)
    ]
    ours = shape_logits(logits, mx.array(drafts), histories, sampling)
    plain = np.array(logits.astype(mx.float32))
    for row, params in enumerate(sampling):
        for slot in range(width + 1):
            text = [*outputs[row], *drafts[row, :slot].tolist()]
            expected = reference_logits(plain[row, slot], prompts[row], text, params)
            got = np.array(ours[row, slot].astype(mx.float32))
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_history_is_a_value():
    start = RowHistory.start([1, 1, 2], 5)
    longer = start.extended(mx.array([3])).extended(mx.array([3, 4]) + 0)
    assert start.counts.tolist() == [0, 0, 0, 0, 0]
    assert longer.counts.tolist() == [0, 0, 0, 2, 1]
    assert longer.prompted.tolist() == [False, True, True, False, False]


def test_unshaped_logits_pass_untouched():
    logits = mx.zeros((2, 1, 5), dtype=mx.bfloat16)
    assert shape_logits(logits, mx.zeros((2, 0), dtype=mx.int32), [None, None], [GREEDY, UNIT]) is logits


def test_a_penalised_row_needs_its_history():
    with pytest.raises(ValueError, match="row 0"):
        shape_logits(
            mx.zeros((1, 1, 5)),
            mx.zeros((1, 0), dtype=mx.int32),
            [None],
            [replace(UNIT, presence_penalty=1.0)],
        )


def test_bias_beyond_the_vocabulary_is_refused_by_name():
    check_sampling(SamplingParams(logit_bias={4: 1.0}), 5)
    with pytest.raises(RequestError, match="logit_bias") as caught:
        check_sampling(SamplingParams(logit_bias={5: 1.0}), 5)
    assert caught.value.field == "logit_bias"
