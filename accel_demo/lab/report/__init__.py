"""`accel-demo report`: write one page about one or more runs, from their files."""
