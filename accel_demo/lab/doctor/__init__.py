"""`accel-demo doctor`: report this machine, and check launch configs."""
