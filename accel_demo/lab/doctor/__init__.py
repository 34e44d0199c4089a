"""`accel-demo doctor`: describe this machine, or check a launch config."""
