"""Every error a user can meet, as one tree.

DsparkError
├── UsageError            a flag or argument is unknown or out of range
├── RequestError          one request asks for something impossible
│   ├── EmptyPrompt
│   └── ContextOverflow   the prompt does not fit the model's context
├── LoadError             a model, drafter or file cannot be loaded
│   ├── ModelNotFound     no such folder, file or repository
│   ├── BadCheckpoint     a file is missing, truncated, damaged or has the wrong hash
│   ├── UnsupportedModel  the architecture or packaging is not one we run
│   │   └── NotAModel     it is a drafter
│   ├── RemoteCodeRefused the folder carries Python code
│   ├── DrafterMismatch   the drafter was not made for this target
│   ├── OutOfMemory       the model needs more memory than this machine has
│   ├── BadCurves         recorded cost curves are incomplete or damaged
│   └── FailedElsewhere   another process of the run cannot load it; rank 0 says why
├── LoadCancelled         somebody asked a load to stop
├── DownloadError         a registry or hub cannot be reached, or answered wrongly
├── EngineLost            the engine ended or delivers nothing, and the server with it
└── RanksLost             another process of the run is gone, or fell out of step

The message is one sentence that names the field or file; `next_step` says what to do about it.
"""

from __future__ import annotations


class DsparkError(Exception):
    """Base of all errors that are the user's to mend.

    `sentence` names the field or file at fault; `next_step` says what to do next. `seen` and `near` complete
    the two with what else lies on the machine, which only its own users are told: `without_listings`.
    """

    exit_code = 2

    def __init__(
        self, sentence: str, next_step: str = "", *, field: str | None = None, seen: str = "", near: str = ""
    ) -> None:
        self.without_listings = f"{sentence} {next_step}".strip()
        sentence, next_step = f"{sentence} {seen}".strip(), near or next_step
        self.sentence = sentence
        self.next_step = next_step
        self.field = field
        super().__init__(f"{sentence} {next_step}".strip())


class UsageError(DsparkError):
    """A flag, argument or setting is unknown, of the wrong type or out of range."""


class RequestError(DsparkError):
    """A single request cannot be served as asked; the loaded model is unharmed."""


class EmptyPrompt(RequestError):
    """The prompt holds no token."""


class ContextOverflow(RequestError):
    """The prompt, or prompt and answer, do not fit the model's context window."""

    def __init__(
        self,
        prompt_tokens: int,
        context: int,
        *,
        field: str = "prompt",
        at_least: bool = False,
        window: bool = False,
    ) -> None:
        """`at_least`: the prompt may have more tokens; `window`: the model itself could hold more."""
        self.prompt_tokens = prompt_tokens
        self.context = context
        self.at_least = at_least
        super().__init__(
            f"The prompt has {'at least ' * at_least}{prompt_tokens} tokens, and the "
            f"{'context window of this server' if window else _MODELS_CONTEXT} holds {context}.",
            f"Shorten the prompt, or {_MORE_WINDOW if window else 'choose a model with a longer context'}.",
            field=field,
        )


_MODELS_CONTEXT = "model's context"
_MORE_WINDOW = "start the server with a larger --context-window"


class LoadError(DsparkError):
    """A model, drafter or file cannot be loaded."""


class ModelNotFound(LoadError):
    """No folder, file or repository of that name exists."""


class BadCheckpoint(LoadError):
    """A file of the checkpoint is missing, truncated, damaged or has the wrong hash."""


class UnsupportedModel(LoadError):
    """The architecture, packaging or quantization is not one that this program runs."""


class RemoteCodeRefused(LoadError):
    """The model folder carries Python code and the user did not permit running it."""


class NotAModel(UnsupportedModel):
    """A drafter is named where a model belongs."""


class DrafterMismatch(LoadError):
    """The drafter and the target do not fit each other."""


class OutOfMemory(LoadError):
    """The model needs more memory than this machine has."""


class BadCurves(LoadError):
    """Recorded cost curves are incomplete, or hold values that no measurement gives."""


class FailedElsewhere(LoadError):
    """Another process of the run cannot load what was asked for, and rank 0 reports it."""


class LoadCancelled(DsparkError):
    """A load was asked to stop before it was done."""


class DownloadError(DsparkError):
    """A registry or hub cannot be reached, or what it sent is not what was asked for."""


class EngineLost(DsparkError):
    """The engine's thread ended, or has delivered nothing for too long, so the server cannot go on."""

    exit_code = 70


class RanksLost(DsparkError):
    """Another process of a run of several is gone, or the processes fell out of step."""
