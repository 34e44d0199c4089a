"""One training step of one small model, split in five ways."""
