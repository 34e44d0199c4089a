"""`accel-demo memory`: compare predicted with measured memory of a training step."""
