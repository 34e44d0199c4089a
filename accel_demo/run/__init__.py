"""One training run: its position, log, files and checkpoints, and what --resume means."""
