"""Measuring what rounds cost on this machine, and remembering it."""
