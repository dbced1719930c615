"""Proposers: lookup, DSpark, DFlash, and their composition. None of them decides."""
