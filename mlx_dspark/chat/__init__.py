"""Between conversations and token ids, and between token ids and text. Knows no engine and no MLX."""
