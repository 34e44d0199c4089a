"""`accel-demo report`: one page of one or more runs, from their files alone."""
