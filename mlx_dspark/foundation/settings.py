"""Every knob, declared once: its flag, environment name, range, default and help come from one place here.

The command line, the validation and the reference page read these declarations; nothing else lists them.

    LoadSettings       what is decided when a model is loaded
    GenerateSettings   what is decided for each answer
    AskSettings        what only the command line knows: where the prompt comes from, how the answer is shown
    TrainSettings      what is decided when a drafter is trained
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.knobs import (
    About,
    Biases,
    Choice,
    Drafts,
    Knob,
    Number,
    Seconds,
    Settings,
    Switch,
    Texts,
    Threshold,
    Whole,
    Wholes,
    Words,
    suggestion,
)
from mlx_dspark.foundation.paths import CACHE_DIR_VARIABLE, MODEL_DIRS_VARIABLE
from mlx_dspark.foundation.request import SamplingParams

DEFAULT_MODEL = "smollm2-135m"

Mode = Literal["auto", "dspark", "dflash", "draft-model", "lookup", "baseline"]
MODES: tuple[Mode, ...] = ("auto", "dspark", "dflash", "draft-model", "lookup", "baseline")

CPU_WEIGHTS = ("blocks", "dense", "stock")
"""How the CPU back end can hold weights: the repacked blocks of our kernels, float32 matrices, MLX's way."""


@dataclass(frozen=True)
class LoadSettings(Settings):
    """What is decided when a model is loaded."""

    group = "Model and drafting"

    model: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words(f"{DEFAULT_MODEL}, a folder, a .gguf file or a repository"),
            f"The target model: a short name of the registry such as {DEFAULT_MODEL}, a folder, a .gguf "
            "file, a hub repository, or gguf:owner/repository/file.gguf for one file of it.",
            unset=DEFAULT_MODEL,
        ),
    ] = None
    mode: Annotated[
        Mode,
        About(
            Choice(MODES),
            "Who drafts. auto: the drafter or draft model given, or the drafter shipped or registered for "
            "the model, else lookup. baseline: nobody.",
        ),
    ] = "auto"
    drafter: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a folder, a repository or a GGUF file"),
            "A DSpark or DFlash drafter made for the model; its own config says which of the two it is.",
            unset="the one shipped with the model or registered for it, if any",
        ),
    ] = None
    draft_model: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words(f"{DEFAULT_MODEL}, a folder, a .gguf file or a repository"),
            "A smaller model of the same vocabulary that drafts, named as --model names one.",
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        About(
            Whole(1, 64, optional=True),
            "Most tokens that the draft model drafts in a round; --max-draft chooses among them, and pins a "
            "number by itself.",
            unset="as many as --max-draft pins, else 8",
        ),
    ] = None
    max_draft: Annotated[
        int | Literal["auto"] | None,
        About(
            Drafts(),
            "Most drafts verified in a round. auto: chosen anew each round. A number is never overridden. 0 "
            "or full: the whole block; use --mode baseline for plain decoding.",
            unset="the one that pays best on this machine, derived for each answer, or none",
        ),
    ] = None
    calibrate: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Measure anew what drafts cost here, though it is known. Off: neither measure nor use what was "
            "measured.",
            unset="once for each pair, unless --max-draft is given as a number",
        ),
    ] = None
    lookup_drafts: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Ask lookup for a draft first, and the drafter only where text does not repeat.",
            unset="on with DSpark, off with DFlash and a draft model",
        ),
    ] = None
    lookup_long_draft: Annotated[
        int,
        About(
            Whole(0, 64), "Longest lookup draft, reached where a long match says that text is being copied."
        ),
    ] = 32
    confidence_threshold: Annotated[
        float | Literal["auto"],
        About(
            Threshold(),
            "End a block early where the drafter's own confidence falls below this. 0: off. auto: only while "
            "that is measured to pay, which asks for a verify cost that rises and drafts that often fail.",
        ),
    ] = 0.0
    drafter_bits: Annotated[
        int | None,
        About(
            Choice((0, 4, 8), optional=True),
            "Quantize the drafter to this many bits at load. 0: leave it.",
            unset="4, or as it is stored where that is quantized",
        ),
    ] = None
    drafter_window: Annotated[
        int, About(Whole(0), "The drafter sees this many of the newest tokens. 0: all of them.")
    ] = 4096
    kv_bits: Annotated[
        int | None,
        About(
            Choice((4, 8), optional=True),
            "Hold the target's growing keys and values in this many bits, in groups of 64.",
            unset="as the model computes them",
        ),
    ] = None
    max_batch: Annotated[
        int,
        About(
            Whole(1, 256),
            "Most answers generated at once, as one batch, when several threads ask; the others wait.",
        ),
    ] = 1
    trust_remote_code: Annotated[
        bool, About(Switch(), "Let a model folder that carries Python code run it; off, it is refused.")
    ] = False
    memory_guard: Annotated[
        bool,
        About(Switch(), "Refuse a model that needs more memory than this machine has; off, try it anyway."),
    ] = True
    cpu_weights: Annotated[
        str | None,
        About(
            Choice(CPU_WEIGHTS, optional=True),
            "Pin how weights are held on the CPU back end.",
            unset="the fastest, measured once on each machine",
        ),
    ] = None
    small_m: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Multiply the few rows of a round by kernels of ours on a GPU. On: also where they are off by "
            "default, and where they are no faster.",
            unset="where they were proven on this machine",
            env="FORCE_SMALL_M",
        ),
    ] = None
    multirow_attn: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Attend to the few rows of a round by kernels of ours on a GPU. On: as for --small-m.",
            unset="where they were proven on this machine",
            env="FORCE_MULTIROW",
        ),
    ] = None
    wide_gemm: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Dequantize a weight once for each chunk of a prompt on a GPU, where that gives the same bits. "
            "On: as for --small-m.",
            unset="where that was proven on this machine",
        ),
    ] = None
    replay: Annotated[
        bool,
        About(
            Switch(),
            "Compile forwards of few tokens on CUDA and replay them; off, go through the model's code.",
        ),
    ] = True


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
            "Report log-probabilities of the tokens taken and of this many of the likeliest; needs --json.",
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


@dataclass(frozen=True)
class TrainSettings(Settings):
    """What is decided when a drafter is trained."""

    group = "Training"
    env_prefix = ""

    target: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a short name, a folder or a repository"),
            "The model to train a drafter for.",
            unset=DEFAULT_MODEL,
        ),
    ] = None
    output: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a folder"),
            "The folder of the drafter: new, empty, or of an earlier run, which then goes on.",
            unset="it must be given",
        ),
    ] = None
    prompts: Annotated[
        str | Sequence[str],
        About(Texts(), "A file of prompts, JSON lines or plain text; may be repeated."),
    ] = ()
    self_prompts: Annotated[
        int, About(Whole(0), "Let the target write this many user turns itself, and answer them.")
    ] = 0
    self_openers: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a file"),
            "How these turns begin, a line each; or JSON lines with `begin` and perhaps `end`, the words "
            "that a turn closes with.",
            unset="common ways to begin",
        ),
    ] = None
    data: Annotated[
        str | Sequence[str],
        About(
            Texts(),
            "Where the answers are kept; several runs may add to it, one after the other, and none answers a "
            "prompt again. When repeated, new answers go into the first folder, and those of all are "
            "trained on.",
            unset="OUTPUT/run/data",
        ),
    ] = ()
    held_out: Annotated[
        str | Sequence[str],
        About(
            Texts(),
            "A file of prompts to evaluate on, never trained on; may be repeated.",
            unset="some of the answers",
        ),
    ] = ()
    held_out_prompts: Annotated[
        int, About(Whole(0), "Prompts of each content to evaluate on. 0: no evaluation.")
    ] = 40
    held_out_tokens: Annotated[int, About(Whole(2), "Most tokens of an answer in the evaluation.")] = 200
    warm_start: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a folder, a repository or a short name"),
            "Train this DSpark drafter further, in its own shape.",
            unset="a new one",
        ),
    ] = None

    answer_tokens: Annotated[int, About(Whole(16), "Most tokens in an answer.")] = 320
    data_rows: Annotated[
        int | None,
        About(Whole(1, optional=True), "Answers generated at once.", unset="256, on the CPU back end 16"),
    ] = None
    data_time_limit: Annotated[
        float | None,
        About(
            Seconds(),
            "Stop making answers after this long and train on those that are finished; a later run makes the "
            "others.",
        ),
    ] = None
    data_temperature: Annotated[
        float, About(Number(0, 100, above=True), "Half of the answers are greedy, the others drawn at this.")
    ] = 0.8

    layers: Annotated[
        int | None,
        About(Whole(1, 64, optional=True), "Layers of the drafter.", unset="2 to 5, by the target's width"),
    ] = None
    block_size: Annotated[int | None, About(Whole(1, 64, optional=True), "Drafts in a block.", unset="7")] = (
        None
    )
    taps: Annotated[
        Sequence[int] | None,
        About(
            Wholes(-1),
            "Target layers whose output the drafter reads, from 0; -1 is the embedding.",
            unset="5, evenly spread",
        ),
    ] = None
    markov: Annotated[
        Literal["vanilla", "gated", "rnn", "none"] | None,
        About(
            Choice(("vanilla", "gated", "rnn", "none"), optional=True),
            "The Markov head: how a draft depends on the one before it.",
            unset="vanilla",
        ),
    ] = None
    markov_rank: Annotated[
        int | None,
        About(Whole(1, 4096, optional=True), "Rank of the Markov head.", unset="64 to 256, by the width"),
    ] = None
    confidence: Annotated[
        bool | None,
        About(Switch(optional=True), "Learn how likely each draft is to be accepted.", unset="on"),
    ] = None
    draft_vocab: Annotated[
        int | None,
        About(
            Whole(0, optional=True),
            "Draft only this many of the most frequent tokens. 0: the target's whole vocabulary.",
            unset="16384 or 32768 for narrow targets, else 0",
        ),
    ] = None
    own_embedding: Annotated[
        bool | None,
        About(Switch(optional=True), "Carry a copy of the target's embedding.", unset="off"),
    ] = None
    own_head: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Carry a vocabulary head of its own, trained from a copy of the target's.",
            unset="on with a reduced vocabulary",
        ),
    ] = None

    steps: Annotated[
        int | None, About(Whole(1, optional=True), "Steps to train.", unset="4 passes over the data")
    ] = None
    time_limit: Annotated[
        float | None,
        About(
            Seconds(),
            "Train for this long, learning rate included, the time for answers not; with --steps, to the "
            "first of both.",
        ),
    ] = None
    batch: Annotated[
        int | None, About(Whole(1, optional=True), "Sequences in a step.", unset="32, on the CPU back end 4")
    ] = None
    width: Annotated[int, About(Whole(32), "Longest sequence, in tokens; longer ones are cut.")] = 448
    anchors: Annotated[
        int | None,
        About(
            Whole(1, 4096, optional=True),
            "Blocks trained in each sequence of a step.",
            unset="64, on the CPU back end 8",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        About(
            Number(0, 1, above=True, optional=True),
            "Highest learning rate.",
            unset="0.0015 * sqrt(576 / hidden width)",
        ),
    ] = None
    warm_up: Annotated[float, About(Number(0, 1), "Share of the run in which the learning rate rises.")] = (
        0.04
    )
    weight_decay: Annotated[float, About(Number(0, 1), "AdamW's weight decay.")] = 0.0
    clip: Annotated[float, About(Number(0, 1000, above=True), "Largest norm of a gradient.")] = 1.0
    cross_entropy_weight: Annotated[float, About(Number(0, 1000), "Weight of the cross-entropy.")] = 0.1
    variation_weight: Annotated[float, About(Number(0, 1000), "Weight of the total variation.")] = 0.9
    confidence_weight: Annotated[float, About(Number(0, 1000), "Weight of the confidence's loss.")] = 1.0
    decay: Annotated[
        float, About(Number(0, 1000, above=True), "A slot counts exp(-slot / this) in the loss.")
    ] = 4.0
    labels: Annotated[
        Literal["soft", "hard"],
        About(
            Choice(("soft", "hard")),
            "What the cross-entropy asks for: the target's distribution, or the token it took.",
        ),
    ] = "soft"
    seed: Annotated[int, About(Whole(0, 2**63 - 1), "Fixes weights, batches and anchors.")] = 0
    checkpoint_every: Annotated[int, About(Whole(1), "Steps between checkpoints, 5 minutes at the most.")] = (
        500
    )
    gradient_checkpointing: Annotated[bool, About(Switch(), "Compute layers twice to need less memory.")] = (
        False
    )
    compile: Annotated[
        bool | None,
        About(
            Switch(optional=True),
            "Let MLX fuse the step; the first step then takes longer, on CUDA and the CPU by minutes.",
            unset="on with Metal",
        ),
    ] = None
    bits: Annotated[
        int,
        About(
            Choice((0, 4, 8)),
            "Store the drafter quantized to this many bits, for which the end of the run trains it. "
            "0: bfloat16, which others read.",
        ),
    ] = 0


def stray_variables(*, unused: Sequence[str] = (), also: Sequence[str] = ()) -> list[str]:
    """A sentence for each variable of the environment that is named like a setting and that nothing reads.

    `unused` names the settings that are not read from there, `also` variables of other settings.
    """
    knobs = [knob for section in (LoadSettings, GenerateSettings) for knob in section.knobs()]
    known = [
        CACHE_DIR_VARIABLE,
        MODEL_DIRS_VARIABLE,
        *also,
        *(knob.env for knob in knobs if knob.name not in unused),
    ]
    near = {name.removeprefix(Settings.env_prefix): name for name in known}
    strays = [name for name in os.environ if name.startswith(Settings.env_prefix) and name not in known]
    real = {knob.env for knob in knobs}
    return [
        f"{name} is set, and nothing reads it. {'' if name in real else _variable_near(name, near)}".rstrip()
        for name in sorted(strays)
    ]


def in_environment(knob: Knob) -> bool:
    """Whether the environment gives this setting a value."""
    return bool(knob.env) and knob.env in os.environ


def from_environment(settings: Settings, name: str) -> bool:
    """Whether a setting has the value that the environment gives it: a default, and no wish of a command."""
    knob = next(knob for knob in settings.knobs() if knob.name == name)
    if not in_environment(knob):
        return False
    try:
        value = knob.kind.gather([knob.parse(os.environ[knob.env], knob.env)])
    except UsageError:
        return False
    return knob.kind.settled(value) == getattr(settings, name)


def _variable_near(name: str, known: Mapping[str, str]) -> str:
    """`Did you mean ...?`, compared without the prefix that all share: letters that changed places count as
    one mistake, so the word with the same letters comes first."""
    word = name.removeprefix(Settings.env_prefix)
    same = next((each for each in known if sorted(each) == sorted(word)), None)
    return f"Did you mean {known[same]}?" if same else suggestion(name, list(known.values()))
