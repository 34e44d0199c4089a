"""One training run: its position, log, folder, checkpoints, and where it resumes."""
