"""The functional face: one call, one answer, from parts that `load_pair` returned."""

from __future__ import annotations

from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, Literal

from mlx_dspark.chat.template import Prompt
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.knobs import Drafts, Kind, Whole
from mlx_dspark.foundation.numbers import brief, is_finite
from mlx_dspark.foundation.settings import GenerateSettings
from mlx_dspark.session.calibrate import known_calibration
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
    max_draft_tokens: MaxDraft | Literal["full"] = None,
    **options: Any,
) -> Result:
    """Answer with any drafter; the text is the target's own.

    `max_draft_tokens`: None is derived, "auto" chosen each round, 0 or "full" the drafter's whole block
    (plain decoding is `greedy_generate`), negative numbers are refused, as is any value without a drafter.
    `options` are fields of GenerateSettings. Raises UsageError or RequestError.
    """
    _check_parts(target=target, tokenizer=tokenizer, drafter=drafter)
    _check("max_draft_tokens", max_draft_tokens, Drafts(), _MAX_DRAFT_WANT)
    max_draft: MaxDraft = Drafts().settled(max_draft_tokens)
    if drafter is None and max_draft is not None:
        raise UsageError(
            f"max_draft_tokens is {brief(max_draft_tokens)}, and no drafter is given that would use it.",
            "Leave it out, or give a drafter.",
            field="max_draft_tokens",
        )
    mode = _mode_of(drafter)
    ids, known = frozenset(end_ids_of(tokenizer)), known_calibration(target, drafter)
    parts = Parts(target, tokenizer, drafter, {}, ids, mode, "", max_draft, calibration=known)
    with parts.session(own_thread=current_thread() is not main_thread()) as session:
        return session.generate(prompt, **options)


def dflash_generate(
    target: Target,
    tokenizer: Any,
    drafter: Drafter | None,
    prompt: Prompt,
    *,
    max_draft_tokens: MaxDraft | Literal["full"] = None,
    **options: Any,
) -> Result:
    """As `speculative_generate`, for a DFlash drafter; any other kind is refused."""
    _check_parts(target=target, tokenizer=tokenizer, drafter=drafter)
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
    max_draft_tokens: MaxDraft | Literal["full"] = None,
    lookup_max_draft: int | None = None,
    lookup_long_draft: int = 32,
    **options: Any,
) -> Result:
    """As `speculative_generate`, drafting text that repeats; needs no drafter.

    A draft usually has `lookup_max_draft` tokens: 6, or the pinned `max_draft_tokens`, where it is None.
    Where text is being copied it grows up to `lookup_long_draft`, as far as `max_draft_tokens` lets it.
    """
    from mlx_dspark.drafters.lookup import LONGEST_DRAFT

    _check_parts(target=target, tokenizer=tokenizer, drafter=None)
    _check("max_draft_tokens", max_draft_tokens, Drafts(), _MAX_DRAFT_WANT)
    max_draft: MaxDraft = Drafts().settled(max_draft_tokens)
    _check("lookup_max_draft", lookup_max_draft, Whole(1, LONGEST_DRAFT, optional=True))
    _check("lookup_long_draft", lookup_long_draft, Whole(0, LONGEST_DRAFT))
    pinned = max_draft if isinstance(max_draft, int) else 0
    if pinned and lookup_max_draft not in (None, pinned):
        raise UsageError(
            f"lookup_max_draft is {lookup_max_draft}, and max_draft_tokens pins {pinned}.",
            "Leave one of the two out.",
            field="lookup_max_draft",
        )
    drafter = lookup_drafter(max_draft, base=lookup_max_draft or 6, long_draft=lookup_long_draft)
    drafter.bind(target)
    return speculative_generate(target, tokenizer, drafter, prompt, max_draft_tokens=max_draft, **options)


def greedy_generate(target: Target, tokenizer: Any, prompt: Prompt, **options: Any) -> Result:
    """Plain decoding, one token a round: what every other mode must equal.

    Options as above, without those of drafting and without a temperature above 0.
    """
    settings = options.get("settings")
    given = isinstance(settings, GenerateSettings)
    temperature = settings.temperature if given else options.get("temperature", 0.0)
    if is_finite(temperature) and temperature > 0:
        raise UsageError(
            f"temperature is {brief(temperature)}, and greedy_generate draws no tokens.",
            "Leave it out, or use speculative_generate with drafter None.",
            field="temperature",
        )
    if "max_draft_tokens" in options:
        raise UsageError(
            "max_draft_tokens is given, and greedy_generate does not draft.",
            "Leave it out, or use speculative_generate with a drafter.",
            field="max_draft_tokens",
        )
    return speculative_generate(target, tokenizer, None, prompt, **options)


_PARTS = {
    "target": (("spec", "new_rows", "forward"), "target that load_pair returned"),
    "tokenizer": (("encode", "decode"), "tokenizer that load_pair returned"),
    "drafter": (("sources", "new_rows", "propose"), "drafter that load_pair returned, or None"),
}
"""What each part must be able to do, and what to give instead of something that cannot."""


def _check_parts(**parts: Any) -> None:
    for name, part in parts.items():
        needed, instead = _PARTS[name]
        absent = not all(hasattr(part, each) for each in needed)
        if absent and not (name == "drafter" and part is None):
            raise UsageError(
                f"{name} is {brief(part)}, and not a {name}.", f"Give the {instead}.", field=name
            )


_MAX_DRAFT_WANT = 'a positive number, "full" for the whole block, or "auto"'


def _check(name: str, value: Any, kind: Kind, want: str = "") -> None:
    if not kind.accepts(value):
        raise UsageError(
            f"{name} is {brief(value)}, which is not a value it takes.",
            f"Give {want or kind.want}.",
            field=name,
        )


def _mode_of(drafter: Drafter | None) -> str:
    """The mode a drafter amounts to: the model drafter's name, where one is part of it."""
    if drafter is None:
        return "baseline"
    return next((source.name for source in drafter.sources if not source.sporadic), "lookup")
