"""`accel-demo scaling`: measure the speed-up from more processes and fit a scaling law."""
