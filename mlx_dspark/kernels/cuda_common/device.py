"""What launches are laid out for."""

from __future__ import annotations

MULTIPROCESSORS = 132
"""Of a large device: so many times the blocks that each holds at once share out the work."""
