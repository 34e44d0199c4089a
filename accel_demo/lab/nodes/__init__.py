"""`accel-demo nodes`: several machines on one desk."""
