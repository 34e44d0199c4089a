"""`accel-demo crash`: kill a training run repeatedly and check its final weights."""
