"""Small steps between the matrices, without MLX's cost per operation: see README.md."""
