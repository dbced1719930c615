"""Mamba-2 layers (Nemotron-H)."""
