"""`accel-demo bench`: test the course's claims about speed on this machine."""
