"""Proposers: lookup, DSpark, DFlash, a draft model, and their composition. None of them decides."""
