"""`accel-demo doctor`: what this machine has, and what a launch config starts."""
