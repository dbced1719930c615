"""Gated short convolutions (LFM2 and LFM2 MoE)."""
