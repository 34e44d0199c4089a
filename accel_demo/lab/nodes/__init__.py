"""`accel-demo nodes`: run a launch on several nodes, all of them on this machine."""
