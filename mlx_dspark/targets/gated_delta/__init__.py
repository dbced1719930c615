"""Gated delta nets (Qwen3-Next, Qwen3.5 and its MoE)."""
