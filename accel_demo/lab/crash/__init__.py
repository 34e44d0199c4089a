"""`accel-demo crash`: kill a training run repeatedly and compare its weights."""
