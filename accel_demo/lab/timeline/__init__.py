"""`accel-demo timeline`: where the time of a training step goes."""
