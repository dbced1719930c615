"""A greedy Markov chain over a block's logits on CUDA: one kernel for each draft."""
