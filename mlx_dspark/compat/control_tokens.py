"""Seam: whether transformers can encode the control tokens that a user wrote as ordinary text.

Versions: transformers 5. Reason: `apply_chat_template(sanitize_control_tokens=True)` does it; before it came,
the name would reach the template as a variable and do nothing. Delete when the oldest supported transformers
has it.
"""

from __future__ import annotations

import inspect
from functools import lru_cache


@lru_cache(maxsize=1)
def can_sanitize() -> bool:
    """Whether the installed transformers knows `sanitize_control_tokens`."""
    from transformers import PreTrainedTokenizerBase

    return (
        "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    )
