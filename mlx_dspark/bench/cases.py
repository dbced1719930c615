"""What the arms answer: contents, and the cases that are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from mlx_dspark.foundation.bench_settings import BenchmarkSettings
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.train.prompts import encode, read_prompts

SHIPPED = Path(__file__).parent / "prompts"
CONTENTS = ("chat", "code", "math", "edit")
SHIPPED_PROMPTS = 2

Contents = Mapping[str, Sequence[Any]]
"""Prompts by content, as `train.prompts.read_prompts` gives them."""


@dataclass(frozen=True)
class Case:
    """Prompts that are answered together, as token ids; `new` tokens each at most. Figures are told by
    `group`."""

    group: str
    name: str
    prompts: tuple[tuple[int, ...], ...]
    new: int
    temperature: float = 0.0

    @property
    def rows(self) -> int:
        return len(self.prompts)


def shipped_prompts(content: str) -> list[str]:
    """The prompts of a content that comes with the program: one of CONTENTS."""
    return read_prompts(SHIPPED / f"{content}.jsonl")


def contents_of(settings: BenchmarkSettings) -> dict[str, list[Any]]:
    """The prompts that `settings` name, by content. Raises UsageError."""
    if settings.prompts is None:
        most = settings.num_prompts or SHIPPED_PROMPTS
        return {content: shipped_prompts(content)[:most] for content in CONTENTS}
    path = Path(settings.prompts).expanduser()
    return {path.stem: read_prompts(path)[: settings.num_prompts]}


def cases_of(settings: BenchmarkSettings, contents: Contents, tokenizer: Any, context: int) -> list[Case]:
    """Every content's prompts alone; then at the temperature, at the depths and at the rows asked for.

    Raises UsageError for a prompt or depth that does not fit the `context`, in tokens.
    """
    ids = {name: [encode(tokenizer, prompt) for prompt in prompts] for name, prompts in contents.items()}
    alone = [
        Case(content, f"{content} {number}", (prompt,), settings.max_new_tokens)
        for content, prompts in ids.items()
        for number, prompt in enumerate(prompts, 1)
    ]
    drawn = [
        replace(case, group=f"{case.group}, T={settings.temperature:g}", temperature=settings.temperature)
        for case in alone
        if settings.temperature is not None
    ]
    for case in alone:
        _refuse_overlong(case, context)
    return [
        *alone,
        *drawn,
        *(_deep_case(settings, contents, tokenizer, depth, context) for depth in settings.depth or ()),
        *(_batch_case(settings, ids, rows) for rows in settings.rows or () if rows > 1),
    ]


def _refuse_overlong(case: Case, context: int) -> None:
    (prompt,) = case.prompts
    if 0 < context < len(prompt) + case.new:
        raise UsageError(
            f"{case.name} has {len(prompt)} tokens, and with an answer of {case.new} that does not fit the "
            f"model's context of {context}.",
            "Give shorter prompts with --prompts FILE, or a smaller --max-new-tokens.",
            field="prompts",
        )


def _deep_case(
    settings: BenchmarkSettings, contents: Contents, tokenizer: Any, depth: int, context: int
) -> Case:
    new = settings.max_new_tokens
    if 0 < context < depth + new:
        raise UsageError(
            f"depth is {depth}, and with an answer of {new} tokens that does not fit the model's context of "
            f"{context}.",
            "Measure at a smaller depth.",
            field="depth",
        )
    prompt = deep_prompt(tokenizer, contents, depth)
    return Case(f"depth {depth}", f"depth {depth}", (prompt,), new)


def deep_prompt(tokenizer: Any, contents: Contents, depth: int) -> tuple[int, ...]:
    """`depth` token ids: text of all contents, as often as it takes, and the first prompt as the question.

    What stands around a user's turn in the model's template is whole; the text is cut before the question.
    """
    texts = [_text(prompt) for prompts in contents.values() for prompt in prompts]
    filler, question = "\n\n".join(texts), texts[0]
    end = min(len(encode(tokenizer, question)), depth // 2)
    copies = math.ceil(depth / len(encode(tokenizer, filler))) + 1
    while len(ids := encode(tokenizer, "\n\n".join([filler] * copies + [question]))) < depth:
        copies *= 2
    return (*ids[: depth - end], *ids[len(ids) - end :])


def _batch_case(settings: BenchmarkSettings, ids: Mapping[str, Sequence[tuple[int, ...]]], rows: int) -> Case:
    prompts = tuple(islice(_by_turns(list(ids.values())), rows))
    return Case(f"{rows} rows", f"{rows} rows", prompts, settings.max_new_tokens)


def _by_turns(columns: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[tuple[int, ...]]:
    """A prompt of each content by turns, for ever."""
    while True:
        for prompts in zip_longest(*columns):
            yield from (prompt for prompt in prompts if prompt is not None)


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
