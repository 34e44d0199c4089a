"""`accel-demo lr`: compare rules for moving a script to N processes."""
