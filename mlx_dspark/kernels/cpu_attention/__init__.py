"""Attention of a few query rows on the CPU: see README.md."""
