"""A block drafter's whole forward as one CUDA kernel, for drafters whose work is less than launching it."""
