"""Attention of few queries on CUDA: keys and values are read once for all queries of a group of heads."""
