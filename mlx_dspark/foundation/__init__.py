"""Values every layer shares: errors, requests, events, paths. No MLX here."""
