"""A smaller language model of the same vocabulary as a drafter."""
