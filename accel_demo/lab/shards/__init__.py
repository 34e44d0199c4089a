"""`accel-demo shards`: which process reads which sample."""
