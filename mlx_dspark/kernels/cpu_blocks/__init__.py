"""Weights held in blocks of output lanes, multiplied by a kernel of our own: see README.md."""
