"""Attention of few queries on Metal: keys and values are read once for all queries of a group of heads."""
