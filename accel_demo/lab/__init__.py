"""Measure and check, on your own machine; each module here is one verb of `accel-demo`."""
