"""Products of up to 16 rows with a packed matrix on CUDA: each weight is read once for all rows."""
