"""Which kernels of ours a model runs on: each is raced, checked and run for a while before it is used."""
