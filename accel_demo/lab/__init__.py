"""The commands of `accel-demo`, and the code that they share."""
