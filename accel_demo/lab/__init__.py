"""Measure and check, on your own machine: the verbs of `accel-demo`, and what they share."""
