"""The loop that decides nothing about content: it feeds, compares, commits and reports."""
