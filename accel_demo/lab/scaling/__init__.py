"""`accel-demo scaling`: measure the speed-up from more processes, and fit scaling laws to it."""
