"""What changes a running server: its model, loaded, swapped and unloaded, and races over it."""
