"""Transactional layer states: what a model remembers, and how to take it back."""
