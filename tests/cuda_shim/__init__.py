"""CUDA kernels of ours run on a CPU: the same source, lanes as coroutines, warps in lockstep where they
meet."""
