"""Any text model of mlx-lm whose every cache has a state here, MoE included."""
