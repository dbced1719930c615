"""A draft model, from the name a user gave to a drafter for a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlx_dspark.foundation.errors import LoadError, NotAModel, UnsupportedModel, UsageError
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.catalog.checkpoint import Checkpoint
    from mlx_dspark.catalog.progress import Progress
    from mlx_dspark.catalog.resolve import ModelRef
    from mlx_dspark.drafters.draft_model.drafter import DraftModelDrafter
    from mlx_dspark.engine.caps import MaxDraft

LONGEST = 64
"""No draft is longer."""


def drafts_a_round(settings: LoadSettings, max_draft: MaxDraft) -> int:
    """Most drafts of the draft model in a round: what `max_draft` pins, else `num_draft_tokens`, else the
    drafter's own default.

    Raises UsageError where more is pinned than `num_draft_tokens`, or than a draft model can draft.
    """
    from mlx_dspark.drafters.draft_model.drafter import NUM_DRAFT_TOKENS

    asked, pinned = settings.num_draft_tokens, max_draft if isinstance(max_draft, int) else 0
    if asked and pinned > asked:
        raise _contradiction(asked, pinned)
    most = pinned or asked or NUM_DRAFT_TOKENS
    if most > LONGEST:
        raise UsageError(
            f"max_draft is {most}, and a draft model drafts at most {LONGEST} tokens in a round.",
            f"Give at most {LONGEST}.",
            field="max_draft",
        )
    return most


def _contradiction(asked: int, pinned: int) -> UsageError:
    return UsageError(
        f"num_draft_tokens is {asked}, and max_draft pins {pinned} drafts a round.",
        "Leave one of the two out.",
        field="num_draft_tokens",
    )


def find_draft_model(
    settings: LoadSettings,
    progress: Progress,
    *,
    weigh: Callable[[dict[str, Any], int], None] | None = None,
) -> ModelRef:
    """Find, and where needed fetch, the draft model, with a look at its config and files; `weigh` is as for
    `resolve_model`.

    Raises UsageError, LoadError or DownloadError.
    """
    from mlx_dspark.catalog.resolve import resolve_model
    from mlx_dspark.session.fits import config_of, stored_bytes
    from mlx_dspark.targets.load import refuse_config

    asked, pinned = settings.num_draft_tokens, drafts_a_round(settings, settings.max_draft)
    if asked and asked != pinned:
        raise _contradiction(asked, pinned)
    with _blaming(settings):
        found = resolve_model(
            str(settings.draft_model),
            cache_dir=default_cache_dir(),
            trust_remote_code=settings.trust_remote_code,
            progress=progress,
            accept=refuse_config,
            weigh=weigh,
        )
        config_of(found)
        stored_bytes(found)
    return found


def load_draft_model(
    found: ModelRef, settings: LoadSettings, target: Checkpoint, progress: Progress, *, ranks: int
) -> DraftModelDrafter:
    """The draft model as a drafter for `target`, not yet bound; each of several `ranks` holds all of it.

    Raises DrafterMismatch where the vocabularies differ, and what loading a model raises.
    """
    from mlx_dspark.catalog.checkpoint import computes_on_cpu, load_checkpoint
    from mlx_dspark.drafters.draft_model.drafter import DraftModelDrafter
    from mlx_dspark.drafters.draft_model.vocabulary import check_same_vocabulary
    from mlx_dspark.kernels.dispatch import STOCK
    from mlx_dspark.session.placed import wanted_kernels
    from mlx_dspark.session.trust import refuse_untrusted
    from mlx_dspark.targets.load import load_target, refuse_model

    cache_dir = default_cache_dir()
    with _blaming(settings):
        checkpoint = load_checkpoint(found, progress=progress, accept=refuse_model)
        check_same_vocabulary(_vocabulary(target), _vocabulary(checkpoint), called=found.name)
        model = load_target(
            checkpoint,
            cpu_weights=STOCK if ranks > 1 and computes_on_cpu() else settings.cpu_weights,
            kernels=wanted_kernels(settings, ranks),
            replay=settings.replay and ranks == 1,
            cache_dir=cache_dir,
            progress=progress,
        )
        drafter = DraftModelDrafter(
            model,
            num_draft_tokens=drafts_a_round(settings, settings.max_draft),
            stand_in=_stand_in(checkpoint, model.spec.vocab),
            fingerprint=checkpoint.fingerprint,
        )
        refuse_untrusted(
            model,
            checkpoint,
            drafter,
            called=found.name,
            max_batch=settings.max_batch,
            cache_dir=cache_dir if ranks == 1 else None,
            progress=progress,
        )
    return drafter


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    tokenizer: Any = checkpoint.tokenizer
    return tokenizer.get_vocab()


def _stand_in(checkpoint: Checkpoint, vocab: int) -> int:
    """An end of text that the model knows, to be read where a token is unknown to it."""
    return next((token for token in sorted(checkpoint.eos_token_ids) if token < vocab), 0)


@contextmanager
def _blaming(settings: LoadSettings) -> Iterator[None]:
    """An error that would read as one about the model says that it is about the draft model."""
    try:
        yield
    except UnsupportedModel as error:
        advice = "Choose another draft model."
        if isinstance(error, NotAModel):
            advice = "Name it with --drafter, in the place of --draft-model."
        raise UnsupportedModel(
            f"The draft model {settings.draft_model} cannot be used: {error.sentence}",
            advice,
            field="draft_model",
        ) from error
    except LoadError as error:
        error.field = "draft_model" if error.field in (None, "model") else error.field
        raise
