"""Every knob, declared once: its flag, environment name, range, default and help come from one place here.

The command line, the validation and the reference page read these declarations; nothing else lists them.

    LoadSettings       what is decided when a model is loaded
    GenerateSettings   what is decided for each answer
    AskSettings        what only the command line knows: where the prompt comes from, how the answer is shown
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlx_dspark.foundation.knobs import (
    About,
    Biases,
    Choice,
    Drafts,
    Number,
    Settings,
    Switch,
    Texts,
    Whole,
    Words,
)
from mlx_dspark.foundation.request import SamplingParams

DEFAULT_MODEL = "smollm2-135m"

Mode = Literal["auto", "dspark", "dflash", "lookup", "baseline"]
MODES: tuple[Mode, ...] = ("auto", "dspark", "dflash", "lookup", "baseline")


@dataclass(frozen=True)
class LoadSettings(Settings):
    """What is decided when a model is loaded."""

    group = "Model and drafting"

    model: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a short name, a folder or a repository"),
            "The target model: a short name, a folder, or a repository of the hub.",
            unset=DEFAULT_MODEL,
        ),
    ] = None
    mode: Annotated[
        Mode,
        About(
            Choice(MODES),
            "Who drafts. auto: the drafter given or shipped with the model, else lookup. baseline: nobody.",
        ),
    ] = "auto"
    drafter: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a folder or a repository"),
            "A DSpark or DFlash drafter made for the model; its own config says which of the two it is.",
            unset="the one shipped for the model, if any",
        ),
    ] = None
    max_draft: Annotated[
        int | Literal["auto"] | None,
        About(
            Drafts(),
            "Most drafts verified in a round. auto: chosen anew each round. 0 or full: the whole block.",
            unset="derived at load",
        ),
    ] = None
    lookup_drafts: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Ask lookup for a draft first, and the drafter only where text does not repeat.",
            unset="on with DSpark, off with DFlash",
        ),
    ] = None
    lookup_long_draft: Annotated[
        int,
        About(
            Whole(0, 64), "Longest lookup draft, reached where a long match says that text is being copied."
        ),
    ] = 32
    confidence_threshold: Annotated[
        float,
        About(Number(0, 1), "End a block early where the drafter's own confidence falls below this. 0: off."),
    ] = 0.0
    drafter_bits: Annotated[
        int,
        About(Choice((0, 4, 8)), "Quantize the drafter to this many bits at load. 0: leave it."),
    ] = 4
    drafter_window: Annotated[
        int, About(Whole(0), "The drafter sees this many of the newest tokens. 0: all of them.")
    ] = 4096
    trust_remote_code: Annotated[
        bool, About(Switch(), "Let a model folder that carries Python code run it; off, it is refused.")
    ] = False
    cpu_weights: Annotated[
        str | None,
        About(
            Words("the name of a weight layout"),
            "Pin how weights are held on the CPU back end.",
            unset="the fastest, measured once on each machine",
        ),
    ] = None


@dataclass(frozen=True)
class GenerateSettings(Settings):
    """What is decided for each answer."""

    group = "Answer"

    max_new_tokens: Annotated[int, About(Whole(1), "Most tokens in the answer; exact.")] = 220
    temperature: Annotated[
        float, About(Number(0, 100), "0 takes the likeliest token; above 0 tokens are drawn.")
    ] = 0.0
    top_p: Annotated[
        float,
        About(Number(0, 1, above=True), "Draw from the smallest set of tokens that has this probability."),
    ] = 1.0
    top_k: Annotated[int, About(Whole(0), "Draw from this many of the likeliest tokens. 0: off.")] = 0
    min_p: Annotated[
        float, About(Number(0, 1), "Leave out tokens less likely than this share of the likeliest. 0: off.")
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        About(Number(0, 10, above=True), "Weaken tokens of prompt and answer by this factor. 1: off."),
    ] = 1.0
    presence_penalty: Annotated[
        float, About(Number(-10, 10), "Take this off the logit of every token already in the answer.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, About(Number(-10, 10), "Take this off a token's logit for each time it is in the answer.")
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        About(Biases(), "Add numbers to the logits of token ids, as ID=NUMBER; may be repeated."),
    ] = field(default_factory=dict)
    seed: Annotated[
        int | None,
        About(
            Whole(0, 2**64 - 1, optional=True), "The same seed draws the same tokens.", unset="a fresh one"
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        About(
            Whole(0, 100, optional=True),
            "Report log-probabilities of the tokens taken and of this many of the likeliest.",
        ),
    ] = None
    stop: Annotated[
        str | Sequence[str], About(Texts(), "End the answer before this text; may be repeated.")
    ] = ()
    system: Annotated[str | None, About(Words(), "A system message ahead of the conversation.")] = None
    chat_template: Annotated[
        bool, About(Switch(), "Put the prompt into the model's chat template; off, continue the raw text.")
    ] = True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> SamplingParams:
        """The part that says how the next token is drawn."""
        shared = {each.name for each in dataclasses.fields(SamplingParams)}
        return SamplingParams(**{k.name: getattr(self, k.name) for k in self.knobs() if k.name in shared})


@dataclass(frozen=True)
class AskSettings(Settings):
    """What only the command line knows."""

    group = "Input and output"
    env_prefix = ""

    prompt: Annotated[
        str,
        About(
            Words("some text, or - for standard input"), "The user's text; - reads it from standard input."
        ),
    ] = "Explain in two sentences how a rainbow forms."
    stream: Annotated[bool, About(Switch(), "Show text as it is decided; off, all of it at the end.")] = True
    json: Annotated[
        bool, About(Switch(), "Print one JSON object with every field of the result, and nothing else.")
    ] = False
