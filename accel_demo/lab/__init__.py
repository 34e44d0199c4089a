"""Subcommands of `accel-demo` that measure and check things, and the code they share."""
