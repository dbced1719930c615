"""The knobs of `benchmark` and `race`, declared once each, as those of foundation/settings.py are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from mlx_dspark.foundation.knobs import About, Choice, Number, Settings, Switch, Whole, Words
from mlx_dspark.foundation.lists import Caps, Drafting, Draftings, Listed, Sizes
from mlx_dspark.foundation.pictures import PICTURES
from mlx_dspark.foundation.settings import DEFAULT_MODEL

DRAFTING_MODES = ("auto", "dspark", "dflash", "draft-model", "lookup")
BASELINE, CONTROL = "baseline", "control"
MLX_LM = "mlx-lm"
TERMINAL = "terminal"


@dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """What is measured, and how it is shown."""

    group = "Benchmark"
    env_prefix = ""

    prompts: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a file of prompts"),
            "A file of prompts: JSON lines with prompt, messages, turns or text; or plain text, a prompt a "
            "paragraph.",
            unset="chat, code, math and edit prompts that come with the program",
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        About(
            Whole(1, optional=True),
            "The first so many prompts of each content.",
            unset="2 of those that come with the program, all of a file",
        ),
    ] = None
    max_new_tokens: Annotated[int, About(Whole(2), "Most tokens in an answer.")] = 128
    modes: Annotated[
        Sequence[str] | None,
        About(
            Listed(Choice(DRAFTING_MODES)),
            "Who drafts, against plain decoding, which is always measured.",
            unset="auto, and lookup where auto is another",
        ),
    ] = None
    caps: Annotated[
        Sequence[int | str | None] | None,
        About(
            Listed(Caps()),
            "What --max-draft each mode is measured with; derived is what it does without that flag.",
            unset="derived",
        ),
    ] = None
    trials: Annotated[
        int, About(Whole(1), "Turns of every arm on every prompt, in an order drawn anew for each.")
    ] = 3
    temperature: Annotated[
        float | None,
        About(
            Number(0, 100, above=True, optional=True),
            "Measure at this temperature too.",
            unset="greedy only",
        ),
    ] = None
    depth: Annotated[
        Sequence[int] | None,
        About(
            Listed(Sizes(64)),
            "Measure with so long prompts too, made of the contents' text.",
            unset="the prompts as they are",
        ),
    ] = None
    rows: Annotated[
        Sequence[int] | None,
        About(Listed(Whole(1, 256)), "Measure so many answers at once too, as one batch.", unset="one"),
    ] = None
    against: Annotated[
        str | None,
        About(
            Choice((MLX_LM,), optional=True),
            "Measure stock mlx-lm too, in a process of its own, on answers that run alone.",
        ),
    ] = None
    against_draft_model: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words(f"{DEFAULT_MODEL}, a folder, a .gguf file or a repository"),
            "A smaller model to measure stock mlx-lm's draft-model mode with.",
        ),
    ] = None
    order_seed: Annotated[
        int, About(Whole(0, 2**63 - 1), "Fixes the order of the turns, and drawn tokens.")
    ] = 0
    json: Annotated[bool, About(Switch(), "Print one JSON object in place of the tables.")] = False
    plot: Annotated[
        str | None,
        About(
            Words(f"{TERMINAL}, or a file that ends in {', '.join(PICTURES)}"),
            f"Draw the rates as bars: {TERMINAL} prints them, a .png, .svg or .pdf file needs matplotlib.",
        ),
    ] = None


@dataclass(frozen=True)
class RaceSettings(Settings):
    """Who races, on what, and how it is shown."""

    group = "Race"
    env_prefix = ""

    prompt: Annotated[
        str | None,
        About(
            Words("some text"),
            "What all arms answer; - reads standard input.",
            unset="a task in code, or one of copying for lookup",
        ),
    ] = None
    arms: Annotated[
        Sequence[Drafting] | None,
        About(
            Listed(Draftings(DRAFTING_MODES, (BASELINE, CONTROL)), least=2, most=4),
            f"Who races, as MODE or MODE:CAP. {BASELINE}: nobody drafts. {CONTROL}: the drafter goes along, "
            "and its cap is 0.",
            unset=f"{BASELINE},auto",
        ),
    ] = None
    max_new_tokens: Annotated[int, About(Whole(2), "Most tokens in an answer.")] = 200
    system: Annotated[str | None, About(Words(), "A system message ahead of the prompt.")] = None
    json: Annotated[bool, About(Switch(), "Print one JSON object in place of the race.")] = False
