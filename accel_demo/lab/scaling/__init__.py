"""`accel-demo scaling`: measure the speed-up with more processes, and fit scaling laws to it."""
