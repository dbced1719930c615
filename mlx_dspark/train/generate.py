"""The target's own answers, generated in waves by the engine and stored as token ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from mlx_dspark.contracts import Target
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.train.data import Answer, DiskStore
from mlx_dspark.train.prompts import OPENERS, UserTurns, encode

SHORTEST_TURN, LONGEST_TURN = 3, 160
SHORTEST_ANSWER = 16


@dataclass(frozen=True)
class Recipe:
    """How answers are made.

    Every `greedy_every`-th answer is greedy, the others drawn at `temperature`; `rows` run at once; answers
    have at most `answer_tokens` tokens; `seed` and the number of the wave fix all draws.
    """

    rows: int = 256
    answer_tokens: int = 320
    prompt_tokens: int = 512
    temperature: float = 0.8
    greedy_every: int = 2
    seed: int = 0


@dataclass(frozen=True)
class WaveDone:
    """Progress of data generation: sequences and answer tokens stored so far, and the rate of this wave."""

    sequences: int
    answer_tokens: int
    tokens_per_sec: float
    prompts_left: int


class Answerer:
    """Runs waves of rows through one target."""

    def __init__(self, target: Target, tokenizer: Any, end_ids: frozenset[int], recipe: Recipe) -> None:
        self._engine = Engine(target, rectangle=True)
        self._tokenizer = tokenizer
        self._ends = end_ids
        self._recipe = recipe

    def fill(
        self,
        store: DiskStore,
        prompts: Sequence[Any],
        self_prompts: int,
        *,
        deadline: float | None = None,
        progress: Callable[[WaveDone], None] = lambda _: None,
    ) -> None:
        """Answer every prompt, then `self_prompts` user turns of the target's own, into `store`.

        A store that holds waves already goes on after them. Stops at `deadline` (of `time.monotonic`).
        """
        recipe, waves = self._recipe, self._waves(prompts, self_prompts)
        for number, (given, own) in enumerate(waves):
            if number < store.waves:
                continue
            if deadline is not None and monotonic() >= deadline:
                return
            rng = random.Random(f"{recipe.seed}/{number}")
            started = monotonic()
            turns = [encode(self._tokenizer, prompt) for prompt in given] + self._own_turns(own, rng)
            turns = [turn for turn in turns if len(turn) <= recipe.prompt_tokens]
            answers = self._answers(turns, rng)
            store.append(answers)
            rate = sum(len(a.answer) for a in answers) / (monotonic() - started)
            left = len(prompts) + self_prompts - (number + 1) * recipe.rows
            progress(WaveDone(len(store), store.answer_tokens, rate, max(0, left)))

    def _waves(self, prompts: Sequence[Any], self_prompts: int) -> Iterator[tuple[Sequence[Any], int]]:
        """Waves of `rows` rows: given prompts first, then numbers of own ones."""
        rows, total = self._recipe.rows, len(prompts) + self_prompts
        for start in range(0, total, rows):
            given = prompts[start : start + rows]
            yield given, min(rows, total - start) - len(given)

    def _own_turns(self, count: int, rng: random.Random) -> list[tuple[int, ...]]:
        if not count:
            return []
        around = UserTurns(self._tokenizer)
        begun = [around.opened(rng.choice(OPENERS)) for _ in range(count)]
        texts = self._run([(ids, LONGEST_TURN, self._drawn(1.0, rng)) for ids in begun])
        return [
            (*ids, *text[:-1], *around.closing)
            for ids, text in zip(begun, texts, strict=True)
            if text[-1] in self._ends and len(text) > SHORTEST_TURN
        ]

    def _answers(self, turns: Sequence[tuple[int, ...]], rng: random.Random) -> list[Answer]:
        recipe, wanted = self._recipe, []
        for i, turn in enumerate(turns):
            greedy = i % recipe.greedy_every == 0
            sampling = SamplingParams() if greedy else self._drawn(recipe.temperature, rng)
            wanted.append((turn, recipe.answer_tokens, sampling))
        texts = self._run(wanted)
        return [Answer(t, a) for t, a in zip(turns, texts, strict=True) if len(a) >= SHORTEST_ANSWER]

    def _drawn(self, temperature: float, rng: random.Random) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=rng.getrandbits(63))

    def _run(self, wanted: Sequence[tuple[tuple[int, ...], int, SamplingParams]]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in wanted]
        requests = [GenerateRequest(ids, limit, s, self._ends) for ids, limit, s in wanted]
        for index, event in self._engine.run(requests):
            if isinstance(event, Committed):
                texts[index] += event.tokens
        return texts
