"""DFlash 2 drafters: DFlash with convolutions along the block and a selector of candidates (Inco AI)."""
