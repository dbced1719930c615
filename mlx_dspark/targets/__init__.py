"""Models that decide: one folder a family, found by what the model's own cache is made of."""
