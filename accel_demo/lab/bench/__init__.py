"""`accel-demo bench`: measure the course's claims about speed on this machine."""
