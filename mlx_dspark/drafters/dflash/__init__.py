"""DFlash drafters: parallel drafts through the tables of the target (z-lab)."""
