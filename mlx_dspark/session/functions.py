"""The functional face: one call, one answer, from parts that `load_pair` returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_dspark.chat.template import Prompt
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.session.pair import Parts, end_ids_of, lookup_drafter
from mlx_dspark.session.result import Result

if TYPE_CHECKING:
    from mlx_dspark.contracts import Drafter, Target
    from mlx_dspark.engine.caps import MaxDraft


def speculative_generate(
    target: Target,
    tokenizer: Any,
    drafter: Drafter | None,
    prompt: Prompt,
    *,
    max_draft_tokens: MaxDraft = None,
    **options: Any,
) -> Result:
    """Answer with any drafter; the text is the target's own.

    `max_draft_tokens`: None is derived, "auto" chosen each round, 0 the drafter's whole block, negative
    numbers are refused. `options` are fields of GenerateSettings. Raises UsageError or RequestError.
    """
    mode = _mode_of(drafter)
    parts = Parts(
        target, tokenizer, drafter, {}, frozenset(end_ids_of(tokenizer)), mode, "", max_draft_tokens
    )
    return parts.session().generate(prompt, **options)


def dflash_generate(
    target: Target,
    tokenizer: Any,
    drafter: Drafter | None,
    prompt: Prompt,
    *,
    max_draft_tokens: MaxDraft = None,
    **options: Any,
) -> Result:
    """As `speculative_generate`, for a DFlash drafter; any other kind is refused."""
    if _mode_of(drafter) != "dflash":
        raise UsageError(
            "drafter is not a DFlash drafter.", "Use speculative_generate, which takes any.", field="drafter"
        )
    return speculative_generate(
        target, tokenizer, drafter, prompt, max_draft_tokens=max_draft_tokens, **options
    )


def lookup_generate(
    target: Target,
    tokenizer: Any,
    prompt: Prompt,
    *,
    max_draft_tokens: MaxDraft = None,
    lookup_max_draft: int = 6,
    lookup_long_draft: int = 32,
    **options: Any,
) -> Result:
    """As `speculative_generate`, drafting text that repeats; needs no drafter."""
    drafter = lookup_drafter(max_draft_tokens, base=lookup_max_draft, long_draft=lookup_long_draft)
    drafter.bind(target)
    return speculative_generate(
        target, tokenizer, drafter, prompt, max_draft_tokens=max_draft_tokens, **options
    )


def greedy_generate(target: Target, tokenizer: Any, prompt: Prompt, **options: Any) -> Result:
    """Plain decoding, one token a round: what every other mode must equal. Options as above."""
    return speculative_generate(target, tokenizer, None, prompt, **options)


def _mode_of(drafter: Drafter | None) -> str:
    """The mode a drafter amounts to: the model drafter's name, where one is part of it."""
    if drafter is None:
        return "baseline"
    names = [source.name for source in drafter.sources]
    return next((name for name in names if name != "lookup"), "lookup")
