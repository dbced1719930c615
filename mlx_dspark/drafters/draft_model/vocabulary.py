"""Whether two tokenizers give the same ids to the same tokens. No MLX."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_dspark.foundation.errors import DrafterMismatch
from mlx_dspark.foundation.numbers import brief


def check_same_vocabulary(target: Mapping[str, int], draft: Mapping[str, int], *, called: str) -> None:
    """Raises DrafterMismatch, naming the first id or token that differs, when they contradict each other.

    `target` and `draft` are the vocabularies of two tokenizers, token to id, special tokens included. A token
    that one of them has and the other does not is no contradiction where the other leaves its id free too.
    """
    by_id = _by_id(draft)
    for own, token in _by_id(target).items():
        other = by_id.get(own, token)
        if other != token:
            raise _mismatch(f"id {own} is {brief(token)} to the model and {brief(other)} to {called}")
        if draft.get(token, own) != own:
            raise _mismatch(f"{brief(token)} has id {own} in the model and {draft[token]} in {called}")
    if by_id.keys().isdisjoint(target.values()):
        raise _mismatch("the two have no id in common")


def _by_id(vocabulary: Mapping[str, int]) -> dict[int, str]:
    """Token by id, in the order of ids; of several tokens of one id the first in the order of text."""
    by_id: dict[int, str] = {}
    for token, own in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        by_id.setdefault(own, token)
    return by_id


def _mismatch(difference: str) -> DrafterMismatch:
    return DrafterMismatch(
        f"draft_model has another vocabulary than the model: {difference}.",
        "Choose a draft model of the same family, whose tokenizer is the same.",
        field="draft_model",
    )
