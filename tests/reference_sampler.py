"""The plain sampler once more, slowly: numpy, float64, one slot at a time, written from the definition.

Also the chi-square test that compares draws with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mlx_dspark.foundation.request import SamplingParams


def reference_logits(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], s: SamplingParams
) -> np.ndarray:
    """Penalties and bias on one slot's `[vocab]` logits, after `output`."""
    shaped = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        shaped[token] *= s.repetition_penalty if shaped[token] < 0 else 1 / s.repetition_penalty
    for token in set(output):
        shaped[token] -= s.presence_penalty + s.frequency_penalty * list(output).count(token)
    for token, bias in s.logit_bias.items():
        shaped[token] += bias
    return shaped


def reference_distribution(logits: np.ndarray, s: SamplingParams) -> tuple[np.ndarray, float]:
    """Probabilities `[vocab]` of one slot, and how far the nearest cut is from going the other way.

    Where that margin is of the order of float32 rounding, other answers are as right as this one.
    """
    logits = logits.astype(np.float64)
    vocab, margin = len(logits), math.inf
    if s.greedy:
        return np.eye(vocab)[int(np.argmax(logits))], margin
    weights = np.exp((logits - logits.max()) / s.temperature)
    kept = np.ones(vocab, dtype=bool)
    if 0 < s.top_k < vocab:
        kept &= logits >= np.sort(logits)[::-1][s.top_k - 1]
    if s.top_p < 1:
        p = np.where(kept, weights, 0) / weights[kept].sum()
        values, group = np.unique(-logits, return_inverse=True)
        mass = np.zeros(len(values))
        np.add.at(mass, group, p)
        preceding = (np.cumsum(mass) - mass)[group]
        margin = float(np.abs(preceding[kept] - s.top_p).min())
        kept &= (preceding < s.top_p) | (logits == logits.max())
    if s.min_p > 0:
        below_most = weights[logits < logits.max()]
        margin = min(margin, float(np.abs(below_most / s.min_p - 1).min(initial=math.inf)))
        kept &= weights >= s.min_p
    weights = np.where(kept, weights, 0)
    return weights / weights.sum(), margin


def reference_text(
    table: np.ndarray, prompt: Sequence[int], length: int, s: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of every text of `length` tokens, when the logits after token `t` are `table[t]`."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, mass in texts.items():
            last = text[-1] if text else prompt[-1]
            p, _ = reference_distribution(reference_logits(table[last], prompt, text, s), s)
            longer |= {(*text, token): mass * p[token] for token in np.flatnonzero(p)}
        texts = longer
    return texts


def fit_p_value(texts: np.ndarray, expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square p-value of observed `texts` `[draws, length]`; 0 if an impossible text occurs.

    Texts expected fewer than five times are pooled.
    """
    draws = len(texts)
    seen = Counter(map(tuple, texts.tolist()))
    if not seen.keys() <= expected.keys():
        return 0.0
    cells = [(seen[text], draws * mass) for text, mass in expected.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    common = [cell for cell in cells if cell[1] >= 5]
    if rare:
        pooled = (sum(cell[0] for cell in rare), sum(cell[1] for cell in rare))
        common = [*common, pooled] if pooled[1] >= 5 else common
    if len(common) == 1:
        return 1.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in common)
    return _chi_square_tail(statistic, len(common) - 1)


def _chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X > statistic), by the recurrence of the upper incomplete gamma function at half integers."""
    half = statistic / 2
    if freedom % 2:
        tail, order = math.erfc(math.sqrt(half)), 0.5
    else:
        tail, order = math.exp(-half), 1.0
    while order < freedom / 2:
        if half > 0:
            tail += math.exp(order * math.log(half) - half - math.lgamma(order + 1))
        order += 1
    return min(tail, 1.0)
