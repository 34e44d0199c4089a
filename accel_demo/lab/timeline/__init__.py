"""`accel-demo timeline`: see where the time of a training step goes."""
