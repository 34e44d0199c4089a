"""`accel-demo parity`: train every version of the training loop and compare the weights."""
