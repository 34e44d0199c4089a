"""`accel-demo lr`: compare rules for moving a training script from one process to N."""
