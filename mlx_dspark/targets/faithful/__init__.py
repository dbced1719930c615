"""Whether what was put around a model computes what the model does, asked of it on real numbers at load."""
