"""`accel-demo parity`: train with every version of the loop and compare weights."""
