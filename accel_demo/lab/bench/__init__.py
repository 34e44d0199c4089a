"""`accel-demo bench`: measure on this machine what the course says about speed."""
