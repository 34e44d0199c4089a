"""`accel-demo lr`: learning rate and loss when a script moves to N processes."""
