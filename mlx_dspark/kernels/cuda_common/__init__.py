"""What the kernels of tensor cores share: a device's instructions, and how MLX is given a kernel."""
