"""Products of few rows with a quantized matrix on Metal: weights are read and dequantized once for all."""
