"""Seam: transformers warns of texts longer than the `model_max_length` of a tokenizer.

Versions: transformers 5. Reason: that number is often not the model's, and a prompt longer than the model's
context is refused here by an error of our own; mlx-lm's wrapper encodes chat templates without a way to pass
`verbose=False`. The flag is the one that transformers sets after its first warning. Delete when the wrapper
passes `tokenizer_kwargs` on, or the warning is gone.
"""

from __future__ import annotations

from typing import Any

_WARNING = "sequence-length-is-longer-than-the-specified-maximum"


def without_length_warning(tokenizer: Any) -> Any:
    """The same tokenizer, which no longer warns of long texts; of other things it does."""
    given = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(given, dict):
        given[_WARNING] = True
    return tokenizer
