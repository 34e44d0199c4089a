"""`accel-demo parity`: train with every version of the training loop, and compare the weights."""
