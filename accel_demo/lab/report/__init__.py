"""`accel-demo report`: write an HTML page about one or more saved runs."""
