"""One training run: its position, log, folder and checkpoints, and how it is resumed."""
