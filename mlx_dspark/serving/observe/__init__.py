"""What can be seen of a running server: folds of what the engine reports of rounds and answers."""
