"""From the settings of a server to a model that answers, and what the user should know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.serving.ask import Defaults
from mlx_dspark.serving.model import Model
from mlx_dspark.session.calibrate import calibrated
from mlx_dspark.session.overlong import overlong
from mlx_dspark.session.pair import Parts, load_parts

if TYPE_CHECKING:
    from mlx_dspark.catalog.progress import Progress


@dataclass(frozen=True)
class Loaded:
    """A model, what its requests get where they say nothing, and what both were made from."""

    model: Model
    defaults: Defaults
    parts: Parts
    loading: LoadSettings
    settings: ServeSettings

    def again(self) -> Loaded:
        """The same model with an engine of its own, where the one it had was closed."""
        model = Model(self.parts.session(warn=False), self.window)
        if self.settings.warmup:
            _warm_up(model, None)
        return replace(self, model=model)

    @property
    def window(self) -> int | None:
        """The context window that was asked for or found to fit, None for all that the model has."""
        return self.model.context or None


def load_model(
    loading: LoadSettings,
    settings: ServeSettings,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Loaded:
    """Load a model and make it ready; `note` is told what the user should know.

    Raises UsageError, LoadError or DownloadError.
    """
    parts = calibrated(load_parts(loading, progress), loading.calibrate, progress)
    if parts.calibration is not None and parts.calibration.curves is None and (why := str(parts.calibration)):
        note(f"{why[0].upper()}{why[1:]}.")
    if told := beyond(parts, loading.max_draft, "--max-draft"):
        note(told)
    window = context_window(parts, settings.context_window, note)
    model = Model(parts.session(warn=False), window)
    try:
        if settings.warmup:
            _warm_up(model, progress)
    except BaseException:
        model.close()
        raise
    return Loaded(model, defaults_of(settings, parts), parts, loading, settings)


def beyond(parts: Parts, asked: object, called: str) -> str:
    """What to say where more drafts are asked for than the drafter has in a block; else nothing."""
    return overlong(asked, parts.drafter.sources if parts.drafter is not None else (), called)


def _warm_up(model: Model, progress: Progress | None) -> None:
    from mlx_dspark.catalog.progress import LoadProgress, silent

    tell = progress or silent
    model.warm_up(lambda: tell(LoadProgress("warming up")))


def context_window(parts: Parts, asked: int | None, note: Callable[[str], None]) -> int | None:
    """The most tokens that prompt and answer get, None for all that the model has."""
    declared, room = parts.target.spec.context, parts.room
    if asked is not None:
        if asked > declared:
            note(f"The context window is {declared} tokens, which is all that the model has.")
        elif 0 < room < asked:
            note(
                f"A context window of {asked} tokens may not fit this machine's memory, "
                f"{room} tokens would: --context-window {room}."
            )
        return min(asked, declared)
    if 0 < room < declared:
        note(
            f"The context window is {room} of the model's {declared} tokens, which is what fits this "
            f"machine's memory. --context-window {declared} has all of them."
        )
        return room
    return None


def defaults_of(settings: ServeSettings, parts: Parts) -> Defaults:
    """What requests get where they say nothing: the server's settings, else the model's own."""
    usual = {"temperature": 0.0, "top_p": 1.0, "top_k": 0} | dict(parts.usual)
    chosen = {
        "temperature": settings.default_temperature,
        "top_p": settings.default_top_p,
        "top_k": settings.default_top_k,
    }
    sampling = usual | {name: value for name, value in chosen.items() if value is not None}
    return Defaults(
        max_tokens=settings.default_max_tokens,
        max_tokens_cap=settings.max_tokens_cap,
        thinking=settings.thinking,
        effort=settings.reasoning_effort,
        **sampling,
    )
