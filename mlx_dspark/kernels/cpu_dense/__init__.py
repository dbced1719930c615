"""Weights expanded to float32 and multiplied by numpy's BLAS: see README.md."""
