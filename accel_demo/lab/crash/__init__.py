"""`accel-demo crash`: kill a training again and again, and compare its weights."""
