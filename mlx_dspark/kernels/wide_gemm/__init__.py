"""Products of many rows with a quantized matrix that is dequantized once for all of them."""
