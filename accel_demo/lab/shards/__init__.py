"""`accel-demo shards`: show which process reads which sample."""
