"""Drafting by lookup: what followed the last time these tokens were seen."""

from mlx_dspark.drafters.lookup.drafter import LONGEST_DRAFT, LOOKUP, LOOKUP_LONG, LookupDrafter

__all__ = ["LONGEST_DRAFT", "LOOKUP", "LOOKUP_LONG", "LookupDrafter"]
