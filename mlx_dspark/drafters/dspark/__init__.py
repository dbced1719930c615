"""DSpark drafters: sequential drafts through a Markov head (DeepSpec)."""
