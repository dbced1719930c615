"""The gate of a SwiGLU feed-forward on the CPU: see README.md."""
