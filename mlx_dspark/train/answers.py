"""From the prompts that were asked for to answers on disk, those that are held out left out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import mlx.core as mx

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.settings import TrainSettings
from mlx_dspark.train.data import DiskStore, JoinedStore, PartStore, Source, TokenStore, prompt_key
from mlx_dspark.train.folder import RunFolder
from mlx_dspark.train.generate import Answerer, Answering, Prompt, Recipe
from mlx_dspark.train.progress import Remark
from mlx_dspark.train.prompts import OPENERS, Opener, encode, read_openers, read_prompts
from mlx_dspark.train.target import Teacher

Ids = tuple[int, ...]
Emit = Callable[[Answering | Remark], None]


@dataclass(frozen=True)
class Asked:
    """What the files hold that the settings name; `held_out` by content."""

    prompts: Sequence[Prompt]
    openers: tuple[Opener, ...]
    held_out: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Answers:
    """What is trained on, answers by source of their prompts, and the ids of held-out prompts by content."""

    store: TokenStore
    sources: Counter[str]
    held_out: Mapping[str, Sequence[Ids]]


def texts(value: str | Sequence[str]) -> Sequence[str]:
    """A setting that may be given several times."""
    return (value,) if isinstance(value, str) else value


def read_asked(settings: TrainSettings) -> Asked:
    """Read the files of prompts. Raises UsageError naming file and line."""
    prompts = [
        Prompt(content, source)
        for path in map(Path, texts(settings.prompts))
        for contents, source in [(read_prompts(path), _source(path))]
        for content in contents
    ]
    openers = OPENERS if settings.self_openers is None else tuple(read_openers(Path(settings.self_openers)))
    held_out: dict[str, list[Any]] = {}
    for path in map(Path, texts(settings.held_out)):
        held_out.setdefault(path.stem, []).extend(read_prompts(path, "held_out"))
    return Asked(prompts, openers, held_out)


def _source(path: Path) -> Source:
    return Source(path.name, hashlib.sha256(path.read_bytes()).hexdigest())


def data_stores(settings: TrainSettings, folder: RunFolder, mark: str) -> list[DiskStore]:
    """The folders of answers. Raises UsageError when one holds other things or another target's answers."""
    homes = [Path(home).expanduser() for home in texts(settings.data)] or [folder.run / "data"]
    return [DiskStore(home, mark) for home in homes]


def answers(
    settings: TrainSettings,
    asked: Asked,
    stores: Sequence[DiskStore],
    teacher: Teacher,
    emit: Emit,
    stop: Callable[[], bool],
) -> Answers:
    """Make the answers that are still to be made, and take those of held-out prompts away.

    Raises UsageError when none is left.
    """
    held_out = {name: [encode(teacher.tokenizer, p) for p in each] for name, each in asked.held_out.items()}
    left_out = {prompt_key(ids) for each in held_out.values() for ids in each}
    prompts = _without(asked.prompts, left_out, teacher, emit)
    if prompts or settings.self_prompts:
        limit = settings.data_time_limit
        _answerer(settings, asked.openers, teacher).fill(
            stores[0],
            prompts,
            settings.self_prompts,
            deadline=None if limit is None else monotonic() + limit,
            stop=stop,
            progress=emit,
        )
        mx.clear_cache()
    joined = stores[0] if len(stores) == 1 else JoinedStore(stores)
    store = PartStore(joined, left_out) if left_out else joined
    if not len(store) and not stop():
        raise UsageError(
            "There is not a single answer to train on.",
            "Give other or more prompts with --prompts or --self-prompts, or a longer --data-time-limit.",
            field="prompts",
        )
    return Answers(store, joined.sources(left_out), held_out)


def _without(prompts: Sequence[Prompt], left_out: set[int], teacher: Teacher, emit: Emit) -> Sequence[Prompt]:
    if not left_out or not prompts:
        return prompts
    kept = [each for each in prompts if prompt_key(encode(teacher.tokenizer, each.content)) not in left_out]
    if not kept:
        raise UsageError(
            "Every prompt of --prompts is held out with --held-out too, so that none is left to train on.",
            "Give other prompts to one of the two; without --held-out, some answers are held out.",
            field="held_out",
        )
    if gone := len(prompts) - len(kept):
        are = "is" if gone == 1 else "are"
        emit(Remark(f"{gone} of {len(prompts)} prompts {are} also held out, and {are} not trained on."))
    return kept


def _answerer(settings: TrainSettings, openers: tuple[Opener, ...], teacher: Teacher) -> Answerer:
    recipe = Recipe(
        rows=settings.data_rows or Recipe.rows,
        answer_tokens=settings.answer_tokens,
        temperature=settings.data_temperature,
        seed=settings.seed,
        openers=openers,
    )
    return Answerer(teacher.target, teacher.tokenizer, teacher.end_ids, recipe)
