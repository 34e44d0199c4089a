"""`accel-demo scaling`: what more processes gain, and why not more."""
