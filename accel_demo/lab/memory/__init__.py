"""`accel-demo memory`: compare the predicted and the measured memory of a training step."""
