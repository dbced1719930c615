"""Building blocks that two or more families share."""
