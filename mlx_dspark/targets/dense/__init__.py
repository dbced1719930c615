"""Any text model of mlx-lm whose every layer keeps a growing key/value cache, MoE included."""
