"""Drafting by lookup: what followed the last time these tokens were seen."""

from mlx_dspark.drafters.lookup.drafter import LookupDrafter

__all__ = ["LookupDrafter"]
