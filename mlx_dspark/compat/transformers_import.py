"""Seam: transformers announces on stderr, when first imported, that PyTorch is missing.

Versions: transformers 5. Reason: the notice alarms users of a program that never needs PyTorch. mlx-lm, when
imported, sets the switch against it (`TRANSFORMERS_NO_ADVISORY_WARNINGS`), so it has to come first: take
transformers' names from here. Delete when transformers is silent without PyTorch.
"""

from __future__ import annotations

import mlx_lm  # noqa: F401  isort: skip
from transformers import PreTrainedTokenizerFast

__all__ = ["PreTrainedTokenizerFast"]
