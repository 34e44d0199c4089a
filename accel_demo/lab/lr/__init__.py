"""`accel-demo lr`: compare rules for adapting a training script to N processes."""
