"""Measuring what speculation gains on this machine, and racing arms against each other."""
