"""`accel-demo timeline`: show how each rank spends the time of a training step."""
